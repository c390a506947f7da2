"""The server page of the window, where other programs use the loaded model.

`session` runs `app.server` on a thread. Only `running` imports it, on the first start.
"""
