"""Files attached to a message: read and tokenized in a child process, and shown as chips."""
