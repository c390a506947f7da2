"""How passes of several rows are computed on all ranks: batches of prompts, and their halves.

Imports nothing of `runtime` but a rank's type and its interfaces.
"""
