"""The subcommand `serve`: its options, and the run of a server in the foreground."""
