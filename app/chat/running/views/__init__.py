"""Widgets of the list of running answers."""
