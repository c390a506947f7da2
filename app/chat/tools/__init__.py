"""Calls of tools in chats: a model asks for them, a person lets them run, the model gets results.

Where the tools come from is known only as a `ToolSource`.
"""
