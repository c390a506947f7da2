"""Ollama's protocol, which has to be enabled."""
