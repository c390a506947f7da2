"""Images in prompts: decoded in a sandboxed child, resized, and placed among tokens. No torch."""
