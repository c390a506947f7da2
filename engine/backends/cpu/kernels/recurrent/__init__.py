"""Kernels for recurrent layers, token by token: causal convolution, delta net, state space."""
