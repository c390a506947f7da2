"""What clients send, checked: JSON becomes dataclasses, or an error that names the field.

The schemas of `/openapi.json` are made from these dataclasses. This package knows no protocol and
no HTTP.
"""
