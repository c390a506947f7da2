"""Other machines that compute the window's model with this one: who has joined, and the engine.

Imports no other subject of the app. `team` knows no Qt.
"""
