"""What files hold: GGUF containers and the quantisations of tensors."""
