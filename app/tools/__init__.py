"""Tools on MCP servers: configuration, connections and calls; no Qt.

`mcp` is imported on the hub's thread once a server is enabled.
"""
