"""A model's ranks as threads in this process: jobs, watchdog, transfers and batch overlap.

Imports no layers, models or GPU kernels.
"""
