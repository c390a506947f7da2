"""Mixers, which mix information between tokens: attention, delta nets, state spaces."""
