"""The window as a whole: its layout, the panels in it, and what brings it up and back.

Only `app.main` imports this package; it knows all subjects of the app, and none of them knows it.
"""
