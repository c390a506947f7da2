"""The sampling panel: system prompt, sampling of one chat or of all, and presets."""
