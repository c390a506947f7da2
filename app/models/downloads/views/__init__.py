"""Widgets of the downloads."""
