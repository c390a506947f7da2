"""How programs reach the engine: a thread, a child process, several machines."""
