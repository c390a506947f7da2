"""The gauge of the context: how many tokens the open chat and the draft take, and what is left."""
