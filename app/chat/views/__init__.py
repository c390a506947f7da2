"""Widgets of the chats, independent of each other."""
