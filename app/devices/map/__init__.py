"""The placement map: the device of each tensor, and pins; of the app, imports only `split`."""
