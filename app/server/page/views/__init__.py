"""Widgets of the server page."""
