"""Renders model files' chat templates in a sandboxed child process.

A template may hang inside a C function (a comparison of nested lists, `round(-10**9)`), where only
killing the process stops it. `program` runs in the child and imports little more than jinja2, so
that it starts in a tenth of a second. Importing this package must therefore not import the modules
in it.
"""
