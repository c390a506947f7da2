"""Building blocks of models: matrices, norms, FFNs, experts, blocks, and their sizes. No torch at
run time."""
