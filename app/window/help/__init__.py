"""The help dialogs: shortcuts, versions and licences, and the log."""
