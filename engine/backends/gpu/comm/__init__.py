"""Collectives for ranks on GPUs: one-shot all-reduce, copies, NCCL, gathers to the host.

Imports `gpu.launch`, `gpu.kernels` and elementwise operations, but no matrix products or decoding.
"""
