"""Live figures: memory, load, tokens per second, and where a token's time goes.

Imports no other subject of the app but `split`.
"""
