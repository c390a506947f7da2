"""What a split would cost and how fast it would be, before anything is loaded: no torch."""
