"""Remote models, and models that several machines run together."""
