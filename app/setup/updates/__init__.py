"""Release checks: made only with consent; new releases appear in a banner, never installed."""
