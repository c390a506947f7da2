"""File formats: GGUF containers and tensor quantisation."""
