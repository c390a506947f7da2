"""What a measured search for the fastest split tries, in which order, and what it concludes.

Imports no torch and nothing that holds weights; `engine.measuring.tuning` does the measuring.
"""
