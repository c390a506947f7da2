"""The widgets of remote models."""
