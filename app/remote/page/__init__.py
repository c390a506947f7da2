"""The window's part of remote models: the dialog that connects, and the figures of a server."""
