"""Memory and speed of a split, predicted before anything is loaded, and the choice among splits.

Imports no torch and nothing that holds weights or computes.
"""
