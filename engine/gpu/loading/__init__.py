"""Loading of weights from the file into a GPU, and the dry run that finds the kernels to compile.

Imported only by `engine.runtime`.
"""
