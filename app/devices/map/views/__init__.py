"""Widgets; each knows its own signals and nothing of its neighbours."""
