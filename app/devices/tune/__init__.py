"""The search for the fastest split by measurement.

Imports no other subject of the app but `split`.
"""
