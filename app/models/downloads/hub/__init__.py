"""What a hub has: search, files of a repository, and the header of one. It knows no Qt."""
