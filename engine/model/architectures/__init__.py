"""Model architectures, registered under their GGUF names. Imports only `layers`; no torch at run
time."""
