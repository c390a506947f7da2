"""Splits on the command line: the default split, saved plans, simulated rigs."""
