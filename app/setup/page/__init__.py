"""The engine's user interface: its page and its part of the settings."""
