"""Quantised numbers: what the bytes of each GGML type mean, and the planes they are packed into.

Imports, of the engine, only `gguf.types`; `layout` and `extent` import no torch.
"""
