"""What clients send, checked: JSON becomes dataclasses, or an error that names the field.

The same declarations make the schemas of `/openapi.json`. This package knows no protocol and no
HTTP.
"""
