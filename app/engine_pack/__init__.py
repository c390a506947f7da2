"""The engine pack: PyTorch and what else only the engine imports, fetched into a private folder.

Without Qt, except for the page and what it shows.
"""
