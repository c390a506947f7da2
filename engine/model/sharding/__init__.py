"""Splits a model: shares, boundaries, placements. No torch."""
