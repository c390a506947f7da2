"""Small utilities shared by the whole engine."""
