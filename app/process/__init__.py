"""The window's process, apart from what it shows: Qt's libraries, garbage collection, crashes.

Imports no subject of the app.
"""
