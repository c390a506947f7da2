"""Newer releases: asked for only after consent, told in a banner, never installed."""
