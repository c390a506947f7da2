"""Draft tokens (speculative decoding): proposals for the next tokens, verified in one pass.

Every position is sampled as it would be without drafting, and a draft token is accepted only if it
equals the sampled token, so answers do not depend on drafting. Imports no torch.
"""
