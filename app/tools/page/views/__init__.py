"""Widgets of the dialog of tool servers."""
