"""The window's server: other programs use the loaded model through HTTP.

`session` starts and stops `app.server` on a thread, `LogView` copies what it notes, and the
rest shows that. Only `running` imports the server, and it is imported when a server is started.
"""
