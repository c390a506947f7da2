"""The machine as torch sees it: devices, pinned and process memory, backend choice.

Imports nothing that computes a model: no layers, no kernels, no plans.
"""
