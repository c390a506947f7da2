"""Widgets of the panel beside the chat; each knows its own signals, none its neighbours."""
