"""Guesses of a draft model: a second, smaller model of the same vocabulary."""
