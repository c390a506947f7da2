"""Routes between GPUs: trials of links, first in a child process, and the resulting routes."""
