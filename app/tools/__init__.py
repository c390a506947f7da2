"""Tools of MCP servers: which servers there are, connections to them, calls (no Qt).

`mcp` and what it needs are imported on the hub's own thread, once a server is switched on.
"""
