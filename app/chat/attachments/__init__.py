"""Files attached to messages: read and tokenized in a child process, shown as chips."""
