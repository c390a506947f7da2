"""Reads GGUF model files: header, metadata, tensors, split parts.

Imports no torch, and from the engine only `errors`.
"""
