"""The devices of this machine: split, placement map, tuning, saved plans, monitor, interconnect."""
