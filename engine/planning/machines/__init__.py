"""Plans for several machines: simulated ones, and whether a split over them pays.

Imports no torch, nothing that holds weights, and nothing that connects machines.
"""
