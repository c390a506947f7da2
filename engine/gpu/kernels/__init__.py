"""Kernels in Triton's language, which is compiled for NVIDIA's and AMD's cards or interpreted."""
