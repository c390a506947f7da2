"""The command line: a module or package per subcommand, and their common options and output.

Imports no Qt.
"""
