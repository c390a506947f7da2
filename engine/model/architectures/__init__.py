"""Model architectures: one family per file, registered under the names that GGUF files give it.

Imports only `layers` and what that may import; no torch at run time.
"""
