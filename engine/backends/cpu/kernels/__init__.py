"""Kernels of the CPU: LLVM IR, written for this processor and compiled when a model is loaded.

From the bottom up: `language` is what kernels are written in, `running` compiles and calls them and
shares their work among threads; the other folders are the kernels. `compiled` has those of products
as Python functions. Imports nothing of GPUs.
"""
