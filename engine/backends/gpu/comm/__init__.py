"""Collectives of ranks on GPUs: one-shot all-reduce, copies, NCCL, gathers to the host.

Imports `gpu.launch`, `gpu.kernels` and elementwise operations; no matrix products, no decoding.
"""
