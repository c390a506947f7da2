"""Saved plans: the menu and what it does.

Imports no other subject of the app but `split`.
"""
