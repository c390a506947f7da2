"""Forms of answers: grammars, and which tokens they allow next (llguidance).

Knows tokenizers, not models or answers; imports no torch, and llguidance only where it is used.
"""
