"""A loaded model's answers: scheduler, KV cache, drafts, prompts, queries, state files.

`stream` delivers an answer's events, `generate` decides its tokens, `sequence` stores them, and
`scheduler` plans which sequences the next forward pass computes. This package imports neither `api`
nor `events` nor a host.
"""
