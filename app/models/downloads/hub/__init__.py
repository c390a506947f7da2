"""Search, repositories and headers of a hub; no Qt."""
