"""The measured search for the fastest split.

Imports no other subject of the app but `split`.
"""
