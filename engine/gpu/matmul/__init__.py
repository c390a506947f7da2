"""Matrix products on GPUs: gemv, tile GEMM, GEMM after dequantising, experts, one per head.

Imports `gpu.launch` and `gpu.kernels`, nothing that captures or communicates.
"""
