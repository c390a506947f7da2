"""The settings page, generated from the declarations in `app.core.settings`."""
