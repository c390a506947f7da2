"""Decoding on GPUs without the host: captured tokens, sampling on the device, the stream of ids.

Imported only by `engine.runtime`.
"""
