"""Ollama's protocol, which must be enabled explicitly."""
