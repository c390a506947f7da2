"""GPU backend: operations, matrix products and collectives as Triton kernels.

A few rows are multiplied by a gemv kernel on planes, more on tensor cores; for many rows, weights
are dequantised and multiplied by the vendor's library (`matmul`). Passes with 2, 4, 8 or 16 single
tokens are captured when the first of each size runs; page tables in device memory let a captured
pass serve any sequences.

Imports nothing that loads or runs models; code that also works without Triton imports it lazily.
"""
