"""Collectives of ranks on GPUs: one-shot all-reduce, copies, NCCL.

Imports `gpu.launch` and `gpu.kernels`, no products and nothing that decodes.
"""
