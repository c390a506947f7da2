"""The search for the fastest split by measurement; of the app, imports only `split`."""
