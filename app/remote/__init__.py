"""Remote models, and models that several machines compute together."""
