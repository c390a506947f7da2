"""Images in messages: stored next to the chat, decoded in a child process, shown in the window."""
