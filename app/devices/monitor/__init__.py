"""The monitor: memory, load, tokens per second, and how ranks spend a token's time.

Imports no other subject of the app but `split`.
"""
