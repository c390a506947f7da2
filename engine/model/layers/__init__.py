"""Building blocks of model declarations: matrices, norms, FFNs, experts, blocks, and their sizes.

Imports no implementation of the arithmetic and no torch at run time.
"""
