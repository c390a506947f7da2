"""Models on this machine and on a hub, and the one in use."""
