"""The parts models are declared with: matrices, norms, FFNs, experts, blocks, and their sizes.

Imports no implementation of the arithmetic and no torch at run time.
"""
