"""Quantised formats: reads blocks of each GGML type, and defines the planes to pack them into.

From the engine, it imports only `gguf.tensors`; `layout` imports no torch.
"""
