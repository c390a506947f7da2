"""Child processes used by an installation."""
