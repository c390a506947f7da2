"""The sampling panel: system prompt, sampling values for one chat or all chats, and presets."""
