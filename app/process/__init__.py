"""The process, apart from what it shows: signals, Qt's libraries, garbage collection, crashes.

Imports no subject of the app.
"""
