"""Routes between GPUs: trials of links, initially in a child process, and the resulting routes."""
