"""Answers of a loaded model: scheduler, KV cache, drafts, prompts, queries, state files.

`stream` hands out the events of an answer, `generate` decides its tokens, `sequence` holds them,
and `scheduler` plans which of all sequences the next forward pass computes. Imports neither `api`,
`events` nor a host.
"""
