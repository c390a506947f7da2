"""A server of two tools on its pipes, whose schemas leave a model nothing to get wrong.

`python town_server.py`; it speaks the protocol of 2025-06-18.
"""

import json
import sys
from typing import Any

CITIES = ["Rome", "Oslo"]
CITY = {"city": {"type": "string", "enum": CITIES}}


def tool(name: str, description: str) -> dict[str, Any]:
    closed = {"type": "object", "required": ["city"], "additionalProperties": False}
    return {"name": name, "description": description, "inputSchema": closed | {"properties": CITY}}


TOOLS = [tool("weather", "Tells the weather."), tool("time", "Tells the time.")]


def reply(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a request; None for what is not known."""
    if method == "initialize":
        info = {"name": "town", "version": "1"}
        capabilities: dict[str, Any] = {"tools": {}}
        return {
            "protocolVersion": "2025-06-18", "capabilities": capabilities, "serverInfo": info,
        }  # fmt: skip
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call":
        text = f"{params['name']} of {params['arguments']['city']}: fine"
        return {"content": [{"type": "text", "text": text}]}
    return None


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            result = reply(message["method"], message.get("params") or {})
            error = {"error": {"code": -32601, "message": "no such method"}}
            told = error if result is None else {"result": result}
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"]} | told) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
