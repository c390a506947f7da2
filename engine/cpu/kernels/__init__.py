"""Kernels for the CPU: LLVM code made for this processor when a model is loaded.

From below: `values` and `isa` write single operations, `jit` compiles them and keeps the result,
`team` runs a kernel on several threads. `layout` and `pack` say how quantised matrices lie in
memory, the other modules are the kernels.
"""
