"""The subcommand `bench`."""
