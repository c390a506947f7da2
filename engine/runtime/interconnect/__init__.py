"""Routes between GPUs: trials of links, in a child process at first, and the routes that follow.

Imports `gpu.comm` and `gpu.launch`; nothing that loads or runs a model.
"""
