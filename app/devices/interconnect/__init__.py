"""Links between devices, reported and measured; within the app, imports only `split`."""
