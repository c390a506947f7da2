"""The engine pack: PyTorch and the engine's other dependencies, downloaded to a private folder.

A new pack is downloaded, checked against the lock, unpacked by uv next to the old pack, tested in a
child process, and only then used. No Qt; `app.setup.page` is the user interface.
"""
