"""From logits to tokens: samplers, grammars and drafts."""
