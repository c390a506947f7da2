"""The links between devices: what the driver says and what was measured.

Imports no other subject of the app but `split`.
"""
