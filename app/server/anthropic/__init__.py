"""Anthropic's Messages protocol, translated to the engine's commands and events and back."""
