"""The engine of the window: started, offered where there is none, replaced by another."""
