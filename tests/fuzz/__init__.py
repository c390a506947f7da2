"""Attacks with generated input: more than a minute each, run on demand."""
