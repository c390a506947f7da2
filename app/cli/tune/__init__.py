"""`tandem tune`: the measured search for the fastest split, and the calibration it gives."""
