"""Dialogs of help."""
