"""A model's ranks as threads in this process: executor, collectives and their watchdog.

Imports no layers, models or GPU kernels.
"""
