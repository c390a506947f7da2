"""The machine as torch sees it: devices, pinned and process memory, CUDA's driver, backend choice.

Imports nothing that computes a model: no layers, no kernels, no plans.
"""
