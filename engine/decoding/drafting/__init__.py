"""Guesses of the tokens that come next, of which one pass checks several.

The model samples at each place as it would without them, and a guess counts only where it is what
was sampled. So an answer has the same tokens with and without guesses. Imports no torch.
"""
