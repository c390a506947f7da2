"""Checks of a rank's kernels on its real weights while a model loads; wrong kernels are not used.

A dry run records the first operation that launches each compiled variant (`OpCallLog`). Once
weights are loaded, these operations run again on random numbers and are compared with torch, which
reads the weights from the file (`WeightCheck`). No list of kernels is needed, and all variants are
checked except those that no pass launches.
"""
