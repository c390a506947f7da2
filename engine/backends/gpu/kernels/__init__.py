"""Kernels in Triton's language, compiled for NVIDIA's and AMD's cards, or interpreted."""
