"""Matrix products on GPUs: gemv, tile GEMM, GEMM after dequantising, one matrix per head.

Imports the launching code, the kernels and the steps before products (`elementwise`, `quantised`),
but no communication.
"""
