"""The list of all chats, with folders, pins and automatic titles."""
