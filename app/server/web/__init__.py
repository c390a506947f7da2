"""HTTP: who is let in, routes and responses, and the server that runs. Knows no protocol by name.

Only `site` lists the protocols that there are, and `operation` has one's errors by default.
"""
