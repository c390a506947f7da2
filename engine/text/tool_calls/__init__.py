"""Formats of answers: how models write thinking, content and tool calls, and how to parse them."""
