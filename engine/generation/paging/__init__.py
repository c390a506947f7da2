"""Pages of a KV cache: which tokens they hold, who uses them, and which go first.

A *page* is room for `PAGE` neighbouring tokens in all layers of one *group*; layers with the same
window are one group. Here it is a number: its memory lies with the ranks, who have the same pages
whatever the split. Sequences that begin alike share their pages.

Knows token ids, not models, tensors or devices; imports no torch.
"""
