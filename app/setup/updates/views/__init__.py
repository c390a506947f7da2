"""Widgets that show a newer release."""
