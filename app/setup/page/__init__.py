"""The engine in the window: the page that installs one, and its part of the settings."""
