"""Conversations: their data, files, session and presenter.

Imports no other subject of the app.
"""
