"""Images in prompts: read in a child with limits, brought to a size, and placed among tokens.

Knows pixels and token ids, neither models nor torch; `vision.encoders` encodes pixels.
"""
