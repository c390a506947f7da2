"""What lets the tokens of a sequence see each other: attention, linear attention, state spaces.

Imports only `layers` and what that may import.
"""
