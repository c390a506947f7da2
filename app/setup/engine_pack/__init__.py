"""The engine pack: PyTorch and what else only the engine imports, fetched into a private folder.

An installation is fetched in pieces, checked against the lock, unpacked by uv beside the old one,
tried in a child, and only then named as the current one.

Knows no Qt; `app.setup.page` is its page in the window.
"""
