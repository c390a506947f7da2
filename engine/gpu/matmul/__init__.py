"""Matrix products on GPUs, by the number of rows: gemv, tile GEMM, dequantise and GEMM, experts.

Imports `gpu.launch` and `gpu.kernels`, nothing that captures or communicates.
"""
