"""Bytes and work per rank under a split, fast enough to follow a drag, and splits that fit.

Imports no torch, nothing that holds weights, and no speed prediction.
"""
