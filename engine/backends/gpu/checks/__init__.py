"""Checks of a rank's kernels on its real weights, at a load: what comes out wrong is not used.

A dry run notes the first operation that starts each compiled variant (`OpCallLog`). Once weights
are loaded, each of these is computed again on random numbers and compared with torch, which reads
the weights in the file (`WeightCheck`). So nothing lists kernels, and a variant that is not checked
is one that no pass starts.
"""
