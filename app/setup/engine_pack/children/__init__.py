"""Child processes of an installation."""
