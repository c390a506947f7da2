"""Which routes between GPUs work: trials in a process of their own, and what came of them.

Imports `gpu.comm`; nothing that loads a model.
"""
