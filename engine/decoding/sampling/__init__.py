"""Sampling of the next token on the host: filter steps, the random draw, vocabulary slices. No
torch."""
