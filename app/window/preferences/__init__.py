"""The settings page, which builds itself from the declaration in `app.core.settings`."""
