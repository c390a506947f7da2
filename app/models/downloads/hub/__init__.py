"""A hub's search, repositories and model headers; no Qt."""
