"""Saved plans of a model: their menu and its actions.

Imports no other subject of the app but `split`.
"""
