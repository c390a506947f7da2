"""Widgets of the models page."""
