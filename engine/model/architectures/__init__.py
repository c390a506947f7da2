"""Model architectures: families, registered under the names that GGUF files give them.

Imports only `layers` and what that may import; no torch at run time.
"""
