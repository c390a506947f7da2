"""The model in use: its session, presenter and views.

Imports no other subject of the app but `split`.
"""
