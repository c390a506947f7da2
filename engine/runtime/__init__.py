"""A loaded model: builder, loader, one forward pass on all ranks, re-splits.

Imports nothing that knows text or sampling parameters' meaning: `generation` builds on it.
"""
