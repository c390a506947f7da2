"""The map of which tensor lies on which device, and pinning parts there.

Imports no other subject of the app but `split`.
"""
