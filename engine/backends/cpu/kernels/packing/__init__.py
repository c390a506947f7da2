"""Packing of a file's matrices into planes and words while they are read, and the way back."""
