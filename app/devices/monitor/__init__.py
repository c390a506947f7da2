"""Monitor for devices, tokens per second and ranks; within the app, imports only `split`."""
