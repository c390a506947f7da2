"""The small operations between products: norms, activations, RoPE, routing and additions."""
