"""Matrix products on GPUs: gemv, tile GEMM, GEMM after dequantising, experts, one per head.

Imports launching, kernels and the steps in front of products (`elementwise`, `routing`); nothing
that communicates.
"""
