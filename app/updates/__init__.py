"""Whether a newer release exists: asked only after consent, told in a banner, never installed."""
