"""The chat list, with folders, pins and automatic titles."""
