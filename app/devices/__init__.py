"""This machine's devices: split, placement map, tuning, saved plans, monitor, interconnect."""
