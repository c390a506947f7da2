"""The help dialogs: shortcuts, versions and licences, the log."""
