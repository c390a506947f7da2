"""Bytes and work of each rank under a split, at the speed of a drag, and the splits that fit.

Imports no torch, nothing that holds weights, and no predicted speed.
"""
