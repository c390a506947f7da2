"""Descriptions of the known forms of answers, as data."""
