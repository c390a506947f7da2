"""Access control: host names, web pages and API keys.

Any web page can make a browser send requests to this machine, even under a foreign name that
resolves to it (DNS rebinding). So only this machine's names and listed origins are accepted.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.server.refusal import Refusal
from app.server.settings import ServerSettings
from app.server.web.responses import ErrorShape, refusal_response
from engine import EngineError

OPEN_PATHS = ("/health",)  # paths that need no key and reveal nothing confidential
METHODS = "GET, POST, OPTIONS"

MIN_KEY = 8


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_settings(settings: ServerSettings) -> None:
    """Check that a server with these settings is safe.

    Raises:
        EngineError: other machines could reach it without a key, or the key is invalid.
    """
    if not settings.key and not is_loopback(settings.host):
        raise EngineError(
            "A server on {host} is reachable from other machines, so it needs a key.",
            "Set one with --api-key-file or TANDEM_API_KEY.",
            host=settings.host,
        )
    if settings.key and (len(settings.key) < MIN_KEY or not settings.key.isprintable()):
        raise EngineError(
            "The key needs at least {n} printable characters.",
            "Generate one with: openssl rand -hex 16",
            n=MIN_KEY,
        )


class AccessMiddleware:
    """Access control for an ASGI application.

    Args:
        shape_of: returns the error format for a path.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, shape_of: Callable[[str], ErrorShape]
    ) -> None:
        self._app, self._settings, self._shape_of = app, settings, shape_of
        own = () if is_loopback(settings.host) else (settings.host, socket.gethostname())
        names = {"localhost", *own, *settings.hosts}
        self._names = {name.lower().rstrip(".") for name in names}
        self._is_local = is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        try:
            self._check_host(headers)
            self._check_origin(origin, headers)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await self._answer_preflight(origin, headers, send)
                return
            self._check_key(scope["path"], headers)
        except Refusal as refusal:
            scope["state"]["record"].problem = str(refusal)
            response = refusal_response(refusal, self._shape_of(scope["path"]))
            await response(scope, receive, self._sharing(origin, send))
            return
        await self._app(scope, receive, self._sharing(origin, send))

    def _check_host(self, headers: Headers) -> None:
        """Check the Host header.

        Raises:
            Refusal: the host name is unknown, e.g. because of DNS rebinding.
        """
        name = _host_name(headers.get("host", ""))
        if name in self._names:
            return
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            pass
        else:
            has_zone = "%" in name  # a zone may be any text, and no client sends one
            if not has_zone and (address.is_loopback or not self._is_local):
                return
        raise Refusal(
            403, "The host name {name} is not allowed.", self._settings.hints.host,
            code="host_not_allowed", name=name[:100] or "''",
        )  # fmt: skip

    def _check_origin(self, origin: str | None, headers: Headers) -> None:
        if origin is None or self._allows(origin):
            return
        if origin.partition("://")[2] == headers.get("host"):
            return  # a page on this server
        raise Refusal(
            403, "Web pages from {origin} may not use this server.", self._settings.hints.page,
            code="origin_not_allowed", origin=origin[:100],
        )  # fmt: skip

    def _allows(self, origin: str | None) -> bool:
        listed = self._settings.origins
        return origin is not None and (origin in listed or "*" in listed)

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._settings.key or path in OPEN_PATHS:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not hmac.compare_digest(key.encode("latin-1"), self._settings.key.encode()):
            raise Refusal(
                401, "The key is missing or wrong.", "Send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
            )  # fmt: skip

    async def _answer_preflight(self, origin: str | None, headers: Headers, send: Send) -> None:
        requested = headers.get("access-control-request-headers", "")
        response_headers = [
            (b"access-control-allow-methods", METHODS.encode()),
            (b"access-control-allow-headers", requested.encode("latin-1")),
            (b"access-control-max-age", b"600"),
            (b"access-control-allow-private-network", b"true"),
        ]
        send = self._sharing(origin, send)
        start = {"type": "http.response.start", "status": 204, "headers": response_headers}
        await send(start)
        await send({"type": "http.response.body", "body": b""})

    def _sharing(self, origin: str | None, send: Send) -> Send:
        if origin is None or not self._allows(origin):
            return send
        more = [
            (b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin"),
            (b"access-control-expose-headers", b"Retry-After"),
        ]  # fmt: skip

        async def share(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message.get("headers", ()), *more]}  # type: ignore[misc]
            await send(message)

        return share  # type: ignore[return-value]


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")
