"""Decides which rank holds which slice of each tensor: shares, boundaries, placements.

Imports no torch, and of the engine only `config`, `errors` and `gguf`.
"""
