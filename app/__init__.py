"""Tandem's front end: window and command line. Imports only the public names of `engine`."""
