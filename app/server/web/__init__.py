"""HTTP: access control, routes, responses and the running server; `routes` lists the protocols."""
