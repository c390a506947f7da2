"""Numbers of tokens at which backends change kernels; planning predicts memory and time by them."""

SMALL_BATCH = 8
"""Largest number of tokens for which GPUs use the kernels of a single one: GEMV kernels read each
weight once, attention reads the cache in short pieces, and a token's bits do not depend on the
other tokens."""

BF16_BATCH = 32
"""Smallest number of tokens for which a backend may dequantise matrices to BF16 for a GEMM."""
