"""The command line: one module or package per subcommand, shared options and output; no Qt."""
