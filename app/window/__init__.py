"""The main window: layout, panels, start-up, recovery, preferences and help.

It may import every other package of the app; only `app.main` imports it.
"""
