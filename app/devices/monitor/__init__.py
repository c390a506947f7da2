"""The monitor of devices, tokens per second and ranks; of the app, imports only `split`."""
