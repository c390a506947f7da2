"""Answers in parts: how each is read, and the events of its thought, content and calls."""
