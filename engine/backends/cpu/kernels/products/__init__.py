"""Products with matrices: quantised ones in planes, and unquantised ones as they are in the file.

`panels` are the activations of quantised products, `tile_reader` reads the weights, and
`quantised_gemm` multiplies; `experts` and `fused_gemv` do several products in one job.
"""
