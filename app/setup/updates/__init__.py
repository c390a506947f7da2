"""Release checks: only after consent, shown in a banner, never installed."""
