"""The models that are already on this machine, whichever program has put them there."""
