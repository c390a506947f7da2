"""The ranks of a model as threads of this process: executor, collectives, and who watches them.

Imports no layer, no model and nothing of GPUs' kernels.
"""
