"""The window's process, apart from what it shows: garbage collection and uncaught exceptions.

Imports no subject of the app.
"""
