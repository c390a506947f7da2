"""Widgets of attachments."""
