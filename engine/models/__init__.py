"""Architectures: one family per file, registered by the name that GGUF files give it.

Imports only `layers` and what that may import; no torch at run time.
"""
