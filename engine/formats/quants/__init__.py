"""Quantised formats: reads the blocks of each GGML type, and defines the planes to pack them into.

Imports, of the engine, only `gguf.types`; `layout` and `extent` import no torch.
"""
