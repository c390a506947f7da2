"""Widgets of the page of the engine, and of its part of the settings page."""
