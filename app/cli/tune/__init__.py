"""`tandem tune`: the measured search, and what it teaches predictions."""
