"""Samples the next token from logits on the host: filter steps, the draw, slices of a vocabulary.

Imports no torch, and of the engine only `config` and `errors`.
"""
