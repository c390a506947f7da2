"""CPU backend: operations, weights in planes, and recording of a token for replay.

Imports nothing of GPUs and no Triton.
"""
