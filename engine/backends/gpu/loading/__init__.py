"""Loading weights from the file into a GPU, and the dry run that finds the kernels to compile.

Imports operations and products; must not import `decode`.
"""
