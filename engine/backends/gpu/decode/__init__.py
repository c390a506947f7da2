"""Decoding on GPUs without the host: captured tokens, sampling on the device, the decode loop.

Imports `gpu.comm` and `gpu.launch`, no matrix products, nothing that loads a model.
"""
