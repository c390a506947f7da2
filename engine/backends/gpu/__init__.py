"""GPU backend: operations, matrix products and collectives by Triton kernels.

Few rows are multiplied by a gemv on planes, some by tensor cores, many are dequantised and
multiplied by the vendor's library (`matmul`). Passes over 2, 4, 8 and 16 single tokens are captured
when the first of their size comes; page tables in the device's memory let them serve any sequences.

Imports nothing that loads or runs models; code that also works without Triton imports it lazily.
"""
