"""Renders chat templates of model files in a child process, where none can hang or fill anything.

A template may hang inside a function of C (a comparison of nested lists, `round(-10**9)`), where
only the end of its process stops it. `renderer` is the side of Tandem, `program` that of the child,
which imports nothing but jinja2 and this package, so that it starts in a tenth of a second. Hence
no names are taken from the modules here.
"""
