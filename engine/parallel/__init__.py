"""Ranks of a model as threads of this process: executor, collectives and their watchdog.

Imports no layer, no model and no GPU kernels.
"""
