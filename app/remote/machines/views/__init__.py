"""Widgets of other machines."""
