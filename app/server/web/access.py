"""Access control: hosts, web pages and keys are checked before anything else.

A web page of anywhere can make a browser send requests to this machine, also under a name that its
owner points here (DNS rebinding). So only names of this machine count, and pages that are listed.
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

OPEN_PATHS = ("/health",)
"""Paths that need no key; they tell nothing but that there is a server."""

METHODS = "GET, POST, OPTIONS"

MIN_KEY = 8
"""Least number of characters of a key."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_settings(settings: ServerSettings) -> None:
    """Check that a server with these settings would be safe.

    Raises:
        EngineError: other machines could reach it without a key, or the key is too short.
    """
    if not settings.key and not is_loopback(settings.host):
        raise EngineError(
            f"A server on {settings.host} can be reached from other machines, and needs a key.",
            "Set one with --api-key-file or TANDEM_API_KEY.",
        )
    if settings.key and (len(settings.key) < MIN_KEY or not settings.key.isprintable()):
        raise EngineError(
            f"A key has at least {MIN_KEY} characters, and none that cannot be seen.",
            "For example what `openssl rand -hex 16` prints.",
        )


class AccessMiddleware:
    """Guard of an ASGI application.

    Args:
        shape_of: returns the document in which a refusal is told to who has asked for a path.
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
        """Check that the client knows the server by a name of its own.

        Raises:
            Refusal: it is another name, as where a web page's owner points one here.
        """
        name = _host_name(headers.get("host", ""))
        if name in self._names:
            return
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            pass
        else:
            has_zone = "%" in name  # any text, and no client sends one
            if not has_zone and (address.is_loopback or not self._is_local):
                return
        raise Refusal(
            403, f"This server is not known as {name[:100] or 'nothing'}.",
            self._settings.hints.host, code="host_not_allowed",
        )  # fmt: skip

    def _check_origin(self, origin: str | None, headers: Headers) -> None:
        """Check that no web page asks but those that are listed.

        Raises:
            Refusal: it is another one.
        """
        if origin is None or self._allows(origin):
            return
        if origin.partition("://")[2] == headers.get("host"):
            return  # a page of this server
        raise Refusal(
            403, f"Web pages of {origin[:100]} may not ask this server.",
            self._settings.hints.page, code="origin_not_allowed",
        )  # fmt: skip

    def _allows(self, origin: str | None) -> bool:
        listed = self._settings.origins
        return origin is not None and (origin in listed or "*" in listed)

    def _check_key(self, path: str, headers: Headers) -> None:
        """Check that the client knows the key.

        Raises:
            Refusal: it does not.
        """
        if not self._settings.key or path in OPEN_PATHS:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode("latin-1"), self._settings.key.encode()):
            raise Refusal(
                401, "The key is missing or wrong.", "Send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
            )  # fmt: skip

    async def _answer_preflight(self, origin: str | None, headers: Headers, send: Send) -> None:
        """Answer a browser that asks whether a page may send a request."""
        wanted = headers.get("access-control-request-headers", "")
        found = [
            (b"access-control-allow-methods", METHODS.encode()),
            (b"access-control-allow-headers", wanted.encode("latin-1")),
            (b"access-control-max-age", b"600"),
            (b"access-control-allow-private-network", b"true"),
        ]
        send = self._sharing(origin, send)
        await send({"type": "http.response.start", "status": 204, "headers": found})
        await send({"type": "http.response.body", "body": b""})

    def _sharing(self, origin: str | None, send: Send) -> Send:
        """Return a sender that lets a listed page read the response."""
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
    """Return the name in a Host header, without its port, brackets and last dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")
