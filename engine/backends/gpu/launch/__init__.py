"""Kernels' compilation, configuration, launch and capture.

Imports no kernel and nothing that uses one.
"""
