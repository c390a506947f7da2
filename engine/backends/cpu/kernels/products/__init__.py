"""Products with matrices: quantised ones in planes, and unquantised ones as they are in the file.

`panels` and `int16_panels` are the activations, `tile_reader` reads the weights, and `gemm` is the
loop nest for the operands of `quantised_gemm` and `int16_gemm`. `float_gemm` multiplies in F32;
`experts` and `fused_gemv` run several products as one job.
"""
