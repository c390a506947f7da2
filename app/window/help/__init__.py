"""What helps to use and to mend Tandem: shortcuts, versions and licences, the log."""
