"""Conversations as plain data: what was said, where it is kept, how its text is structured."""
