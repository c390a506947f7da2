"""Models that other machines compute, or help to compute."""
