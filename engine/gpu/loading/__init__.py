"""From the file to packed weights on a GPU, and which kernels to compile meanwhile.

Imported only by `engine.runtime`.
"""
