"""The placement map: each tensor's device, and pins; within the app, imports only `split`."""
