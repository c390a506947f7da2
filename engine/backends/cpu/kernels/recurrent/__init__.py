"""Kernels of recurrent layers, token by token: causal convolution, delta net, state space."""
