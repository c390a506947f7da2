"""The subcommands `serve` and `join`."""
