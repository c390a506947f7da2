"""Versions of messages and what grows from them: the tree, its steps, and their presenter."""
