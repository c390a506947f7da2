"""The engine pack: PyTorch and the engine's other dependencies, downloaded into a private folder.

An installation is downloaded, checked against the lock, unpacked by uv next to the old one, tested
in a child process, and only then used. No Qt; `app.setup.page` is its page in the window.
"""
