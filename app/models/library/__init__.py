"""The models on this machine, including those of other programs."""
