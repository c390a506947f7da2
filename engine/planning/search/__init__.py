"""The measured search for the fastest split: its candidates, their order and its results.

Imports no torch and nothing that holds weights; `engine.hosts.tuning` takes the measurements.
"""
