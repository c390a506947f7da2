"""The engine pack, its page, and release checks."""
