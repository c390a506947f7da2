"""The language that kernels are written in.

`values` writes single instructions, `isa` those that differ between processors, `maths` functions
of real numbers, and `vector_loop` and `parallel_for` loops. Imports no other kernels.
"""
