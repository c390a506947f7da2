"""Computing on CPUs: the operations, packed weights, and tokens that are recorded and repeated.

Imports nothing of GPUs and no Triton.
"""
