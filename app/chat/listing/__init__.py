"""The list of all chats: what it shows of each, folders, pins, and who connects it."""
