"""The split of a model over devices; imports no other subject of the app."""
