"""Kernels in Triton's language, compiled for NVIDIA and AMD GPUs, or interpreted."""
