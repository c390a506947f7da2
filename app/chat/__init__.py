"""Conversations: their data, files, session, presenter and views.

Imports no other subject of the app.
"""
