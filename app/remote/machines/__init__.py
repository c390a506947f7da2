"""Machines that run the window's model together; `team` has no Qt."""
