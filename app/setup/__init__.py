"""The engine pack, its page, and new releases."""
