"""From logits to one token, on the host: steps, the draw, candidates of a slice.

Imports no torch, and of the engine only `config` and `errors`.
"""
