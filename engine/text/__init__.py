"""Turns text into tokens and back: tokenizers and chat templates from GGUF metadata.

Imports no torch, and of the engine only `errors`, `gguf` and `templates`.
"""
