"""Compilation, configuration, launch and capture of kernels; imports no kernel or user of one."""
