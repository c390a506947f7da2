"""Decoding on GPUs without the host: captured tokens, sampling on the device, the decode loop.

Imports `gpu.comm` and `gpu.launch`, but no matrix products and nothing that loads a model.
"""
