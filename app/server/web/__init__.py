"""HTTP: access control, routes, responses and the running server. Knows no protocol by name.

Only `site` lists the protocols that there are, and `operation` has one's errors by default.
"""
