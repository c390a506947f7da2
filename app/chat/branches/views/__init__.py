"""Widgets of messages: the switch between versions, and the menu of steps."""
