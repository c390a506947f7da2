"""The engine pack: PyTorch and what else only the engine imports, fetched into a private folder.

Knows no Qt; `app.engine_page` is its page in the window.
"""
