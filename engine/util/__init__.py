"""Small things that all of the engine shares."""
