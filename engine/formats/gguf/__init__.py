"""Reads GGUF model files: header, metadata, tensors, split parts.

Imports no torch, and of the engine only `errors`.
"""
