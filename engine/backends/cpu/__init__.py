"""CPU backend: operations, weights in planes, and recording of a token for replay.

Products read planes directly, whatever the number of rows. Activations are quantised to one byte
with a scale per 16 columns or, in models with a router, to two bytes with a scale per 32 columns.
F16, BF16 and F32 matrices are multiplied in F32, or as int16 (`kernels.products.int16_panels`) if
the processor has int16 dot products. With `LoadParams.fast_prompts`, long prompts go through torch
in BF16 where measurements show that this is faster.

Imports neither GPU code nor Triton.
"""
