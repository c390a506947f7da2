"""Predicted speed: what devices and links can do, measured or looked up, and what follows from it.

Imports no torch and nothing that holds weights.
"""
