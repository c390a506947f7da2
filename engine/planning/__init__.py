"""Memory and speed of splits, predicted before anything is loaded, and the choice among them.

Imports no torch and nothing that holds weights or computes.
"""
