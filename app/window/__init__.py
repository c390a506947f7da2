"""The main window: layout, panels, start-up, recovery, preferences and help.

It may import all other rooms of the app; only `app.main` imports it.
"""
