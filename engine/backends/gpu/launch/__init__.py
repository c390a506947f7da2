"""Compiling, configuring, launching and capturing kernels; imports no kernels or their users."""
