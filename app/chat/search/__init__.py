"""Full-text search over all chats: words, an index that can be made again, and reading without one.

Knows the chats' data and files, no widget.
"""
