"""Matrix products on GPUs: gemv, tile GEMM, GEMM after dequantising, one matrix per head.

Imports launching, kernels and the steps in front of products (`elementwise`, `quantised`); nothing
that communicates.
"""
