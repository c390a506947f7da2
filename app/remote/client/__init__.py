"""Client for OpenAI-compatible servers, with extensions for Tandem servers; no Qt.

This package must not import the window's packages; its dialog is in `app.remote.page`.
"""
