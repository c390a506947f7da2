"""Small operations between products: norms, activations, RoPE, routing, element-wise functions."""
