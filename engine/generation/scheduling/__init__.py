"""Several answers side by side on one model: who is computed when, and where it lies in the cache.

Knows token ids, work and pages, not what the answers say; imports no torch.
"""
