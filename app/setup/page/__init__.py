"""The engine in the window: its page and its part of the settings."""
