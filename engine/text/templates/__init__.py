"""Renders chat templates of model files in a sandboxed child process.

A template may hang inside a C function (a comparison of nested lists, `round(-10**9)`), where only
the end of its process stops it. `program` runs in the child and imports little more than jinja2, so
that it starts in a tenth of a second. Hence importing a name from here must not pull in the
modules.
"""
