"""Widgets of pictures."""
