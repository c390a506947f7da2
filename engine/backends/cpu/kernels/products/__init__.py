"""Products with matrices: quantised ones in planes, and unquantised ones as they are in the file.

`panels` and `int16_panels` are the activations, `tile_reader` reads the weights, and `gemm` is the
loop nest that multiplies, for the operands of `quantised_gemm` and `int16_gemm`. `strassen` does
that for many tokens; `float_gemm` multiplies in F32; `experts` and `fused_gemv` do several products
in one job.
"""
