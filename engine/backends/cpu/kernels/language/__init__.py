"""The code generator: `values` (instructions), `isa` (instruction sets), `maths` and `loops`.

Imports no kernels.
"""
