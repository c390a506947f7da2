"""Mixers, which let tokens of a sequence see each other: attention, delta nets, state spaces.

Imports only `layers` and what that may import.
"""
