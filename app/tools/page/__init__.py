"""Servers of tools in a window: which there are, the dialog that sets them up, their panel."""
