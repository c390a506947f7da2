"""The list of the answers that are being written, in all chats."""
