"""The command line: one module or package per subcommand, options and output apart.

Imports no Qt.
"""
