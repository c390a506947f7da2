"""GPU backend: operations, matrix products and collectives by Triton kernels.

Imports nothing that loads or runs models; code that also works without Triton imports it lazily.
"""
