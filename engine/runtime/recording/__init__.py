"""Passes over single tokens, which are recorded and replayed: which ones, when, and who samples.

The recordings themselves lie in the ranks.
"""
