"""Ollama's protocol, for programs that know no other; a server has it only if that is asked for."""
