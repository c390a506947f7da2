"""Kernels of recurrent layers: convolutions, delta nets and state spaces, token after token."""
