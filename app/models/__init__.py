"""Models on this machine and on a hub, and the model in use."""
