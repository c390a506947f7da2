"""Widgets for chats, independent of each other."""
