"""The engine pack, the engine page, and release checks."""
