"""The command line: one module per subcommand, argument parsing and output apart."""
