"""A loaded model: builder, loader, one forward pass on all ranks, re-splits.

Imports nothing that knows text, prompts or answers: `generation` builds on it.
"""
