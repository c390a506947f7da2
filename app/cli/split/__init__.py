"""What decides where a model goes on the command line: defaults, saved plans, simulated rigs."""
