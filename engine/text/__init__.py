"""Text in and out: tokenizers and chat templates from GGUF metadata, thinking and tool calls. No
torch."""
