"""The process, apart from what it shows: signals, Qt's libraries, the interpreter, crashes,
temporaries of dead processes, and second starts.

Imports no subject of the app.
"""
