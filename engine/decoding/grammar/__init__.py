"""Structured output: grammars, and the tokens that they allow next (llguidance). No torch."""
