"""Remote models in the window: the connection dialog and server statistics."""
