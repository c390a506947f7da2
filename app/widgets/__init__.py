"""Shared widgets; import no subject of the app."""
