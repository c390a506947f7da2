"""The model in use: its session and presenter.

Imports no other subject of the app but `split`.
"""
