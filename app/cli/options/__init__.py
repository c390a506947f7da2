"""Options of several subcommands, by what they are about."""
