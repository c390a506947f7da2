"""KV caches whose keys and values have different types, as parameters of tests."""

from engine.load_params import KV_TYPES
from tests.helpers.tiers import swept

USUAL_PAIRS = ("q8_0/q4_0", "f16/q8_0", "bf16/f16", "q4_0/f32", "f32/bf16")
"""Pairs in which each type is that of the keys once, and once that of the values."""

MIXED = swept([f"{k}/{v}" for k in KV_TYPES for v in KV_TYPES if k != v], USUAL_PAIRS)
"""Parameters for all pairs of different types; all but the usual ones are slow."""
