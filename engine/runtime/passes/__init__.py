"""Passes of several rows on all ranks: batches of prompts, their halves, sampling of rows.

Imports nothing of `runtime` but a rank's type and its interfaces.
"""
