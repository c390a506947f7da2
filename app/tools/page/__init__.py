"""Tool servers in the window: their configuration, the dialog and the settings panel."""
