"""Kernels of the CPU: LLVM IR, written for this processor and compiled when a model is loaded.

From the bottom up: `values` writes single instructions and `isa` those that differ between
processors, `jit` compiles, `fastcall` calls from Python, `team` shares work among threads. The
other modules are the kernels. Imports nothing of GPUs.
"""
