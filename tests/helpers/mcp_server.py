"""A server of tools made with the package `mcp`: a program on its pipes, or on a real socket."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver import Context, Image
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response


def make_server() -> MCPServer:
    """Return a server with a tool for each thing that may come of a call."""
    server = MCPServer("helper", log_level="CRITICAL")

    @server.tool(annotations=ToolAnnotations(title="Add up", read_only_hint=True))
    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool(structured_output=False)
    async def echo(text: str) -> str:
        return text

    @server.tool(structured_output=False)
    async def variable(name: str) -> str:
        return os.environ.get(name, "none")

    @server.tool(structured_output=False)
    async def fail() -> str:
        raise ToolError("out of cheese")

    @server.tool(structured_output=False)
    async def huge(n: int) -> str:
        return "x" * n

    @server.tool(structured_output=False)
    async def picture() -> list[Any]:
        return ["A dot:", Image(data=b"\x89PNG", format="png")]

    @server.tool(structured_output=False)
    async def grow(ctx: Context) -> str:
        server.add_tool(echo, name="another echo", structured_output=False)
        await ctx.notify_tools_changed()
        return "grown"

    return server


class KeyedAccess(BaseHTTPMiddleware):
    """Lets nobody in without the header "Authorization: Bearer open"."""

    async def dispatch(self, request: Request, call_next: Any) -> Response:
        if request.headers.get("authorization") != "Bearer open":
            return PlainTextResponse("who are you?", 401)
        response: Response = await call_next(request)
        return response


@contextmanager
def served_over_http(*, form: str = "streamable", has_key: bool = False) -> Iterator[str]:
    """Serve on a free port of this machine; yield the address."""
    made = make_server()
    app = made.sse_app() if form == "sse" else made.streamable_http_app()
    if has_key:
        app.add_middleware(KeyedAccess)
    config = uvicorn.Config(
        app, port=0, log_level="critical", lifespan="on", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="mcp-helper")
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server has not begun"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/{'sse' if form == 'sse' else 'mcp'}"
    finally:
        server.should_exit = True
        thread.join(20)


if __name__ == "__main__":
    make_server().run("stdio")
