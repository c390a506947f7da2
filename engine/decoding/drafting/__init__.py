"""Draft tokens (speculative decoding): proposals for the next tokens, which one pass verifies.

The model samples at each place as it would without them, and a draft token counts only where it is
what was sampled. So an answer has the same tokens with and without drafts. Imports no torch.
"""
