"""The process, apart from what it shows: signals, Qt's libraries, garbage collection, crashes,
temporaries of dead processes.

Imports no subject of the app.
"""
