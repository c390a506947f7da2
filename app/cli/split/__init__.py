"""Splits on the command line: the default one, saved plans, simulated rigs."""
