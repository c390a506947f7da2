"""The devices of this machine: split, tensor map, search, saved plans, monitor, interconnect."""
