"""File formats: GGUF containers and the quantisations of tensors."""
