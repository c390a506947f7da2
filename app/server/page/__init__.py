"""The window's server page, which lets other programs use the loaded model.

`session` runs `app.server` on a thread. Only `running` imports that package, on the first start.
"""
