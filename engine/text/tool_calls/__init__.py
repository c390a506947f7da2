"""Formats of answers: where models write what they think, say and call, and how that is parsed.

Imports neither torch nor what generates: text in, parts out.
"""
