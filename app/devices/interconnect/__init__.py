"""Links between devices, reported and measured; of the app, imports only `split`."""
