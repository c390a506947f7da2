"""Draft models: small models that guess for the one that is loaded; their settings and memory."""
