"""Splitting a model over devices; imports none of the app's other feature packages."""
