"""Measurements: benchmarks, speeds of devices, weights and links, configurations of kernels.

Imported by `api` and `host`, and by nothing that computes.
"""
