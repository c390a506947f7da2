"""What computes: the reference in torch, the CPU's kernels and the GPU's."""
