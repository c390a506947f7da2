"""How kernels are compiled, configured, started and captured.

Imports no kernel and nothing that uses one.
"""
