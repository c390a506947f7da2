"""Search for the fastest split by measuring; within the app, imports only `split`."""
