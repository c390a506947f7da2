"""Computing on GPUs by Triton's kernels. Only what serves a GPU imports from here."""
