"""The panel beside the chat: system prompt, sampling of one chat or of all, and presets of it."""
