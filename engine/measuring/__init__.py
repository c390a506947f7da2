"""Measurements: benchmarks, speeds of devices, weights and links, the search for a split.

Imported by `api` and `host`, and by nothing that computes.
"""
