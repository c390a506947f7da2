"""Compute backends: the reference in torch, the CPU kernels and the GPU kernels."""
