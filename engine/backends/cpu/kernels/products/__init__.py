"""Matrix products: quantised matrices in planes, unquantised ones as int16 or as in the file.

`panels` and `int16_panels` pack activations, `tile_reader` reads weights, and `gemm` is the loop
nest for the operands in `quantised_gemm` and `int16_gemm`. `float_gemm` multiplies in F32;
`experts` and `fused_gemv` run several products as one job.
"""
