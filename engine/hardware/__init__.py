"""The machine as torch sees it: devices, pinned and process memory, CUDA driver, backend choice.

Imports nothing that computes a model: no layers, kernels or plans.
"""
