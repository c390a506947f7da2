"""Servers of tools as JSON, in the form that other programs share: an object "mcpServers".

Each of its entries has either `command`, `args`, `env` and `cwd`, or `url` and `headers`. Files of
other programs also say "servers", `serverUrl`, `httpUrl` and `disabled`; those are read as well.
The form is described at https://modelcontextprotocol.io/docs/develop/connect-local-servers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from app.core.translation import tr
from app.tools.tool_server import LONGEST_NAME, ToolServer
from engine import EngineError, one_line

LISTS: Final = ("mcpServers", "servers", "mcp_servers")
URLS: Final = ("url", "serverUrl", "httpUrl")
MOST_SERVERS: Final = 200
MOST_TEXT: Final = 1 << 20

EXAMPLE: Final = '{"mcpServers": {"name": {"command": "…"}}}'


def servers_in(text: str) -> tuple[ToolServer, ...]:
    """Return the servers that a JSON text names.

    Raises:
        EngineError: it is no such text, or one of its servers cannot be used.
    """
    try:
        found = json.loads(text[:MOST_TEXT])
    except (ValueError, RecursionError) as error:
        why = one_line(str(error), 100)
        raise EngineError(tr("This is not JSON: {why}.").format(why=why)) from None
    entries = _entries(found)
    if not entries:
        raise EngineError(
            tr("There is no server in this text."),
            tr("It should look like {example}.").format(example=EXAMPLE),
        )
    return tuple(_server(name, entry) for name, entry in list(entries.items())[:MOST_SERVERS])


def servers_json(servers: Sequence[ToolServer]) -> dict[str, Any]:
    """Return servers as a value that `servers_in` reads from its JSON; without headers' values."""
    return {"mcpServers": {server.name: _entry(server) for server in servers}}


def checked_server(server: ToolServer) -> ToolServer:
    """Return a server that can be used.

    Raises:
        EngineError: it has no name, neither a program nor an address, or text that is none.
    """
    if not server.name or len(server.name) > LONGEST_NAME or not server.name.isprintable():
        text = tr("A server needs a name of at most {n} characters.")
        raise EngineError(text.format(n=LONGEST_NAME))
    if not server.command and not server.url:
        text = tr("{name} needs a command or an address.")
        raise EngineError(text.format(name=server.name))
    if server.url and not _is_address(server.url):
        text = tr("{url} is not an address that begins with http:// or https://.")
        raise EngineError(text.format(url=one_line(server.url, 100)))
    for key, value in (*server.environment.items(), *server.headers.items()):
        if not key or "\0" in key + value or ("=" in key and key in server.environment):
            raise EngineError(
                tr("{name} cannot be the name of a variable.").format(name=one_line(key, 60))
            )
    for key, value in server.headers.items():
        if not (key + value).isascii() or not (key + value).isprintable() or ":" in key:
            text = tr("The header {name} has characters that headers cannot have.")
            raise EngineError(text.format(name=one_line(key, 60)))
    if any("\0" in word for word in server.command) or (server.command and not server.command[0]):
        raise EngineError(tr("{name} has no usable command.").format(name=server.name))
    return server


def _entries(found: Any) -> Mapping[str, Any]:
    """Return the entries of a document by their names."""
    if not isinstance(found, dict):
        return {}
    for key in LISTS:
        if isinstance(found.get(key), dict):
            return dict(found[key])
    if isinstance(found.get("command"), str) or any(key in found for key in URLS):
        name = found.get("name")
        return {name if isinstance(name, str) else tr("Server"): found}
    return {key: entry for key, entry in found.items() if isinstance(entry, dict)}


def _server(name: str, entry: Any) -> ToolServer:
    """Return the server of an entry.

    Raises:
        EngineError: it cannot be used.
    """
    if not isinstance(entry, dict):
        raise EngineError(tr("{name} is not a server.").format(name=one_line(str(name), 60)))
    command, arguments = entry.get("command"), _texts(name, entry, "args")
    url = next((entry[key] for key in URLS if isinstance(entry.get(key), str)), "")
    words: tuple[str, ...] = ()
    if isinstance(command, list):
        words = _texts(name, entry, "command")
    elif isinstance(command, str) and command:
        words = command, *arguments
    server = ToolServer(
        name.strip(),
        words,
        _pairs(name, entry, "env"),
        folder=str(entry.get("cwd") or ""),
        url="" if words else url.strip(),
        headers=_pairs(name, entry, "headers"),
        is_on=entry.get("disabled") is not True,
        hidden=_texts(name, entry, "hiddenTools"),
    )
    return checked_server(server)


def _entry(server: ToolServer) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    if server.command:
        entry |= {"command": server.command[0], "args": list(server.command[1:])}
    if server.environment:
        entry["env"] = dict(server.environment)
    if server.folder:
        entry["cwd"] = server.folder
    if server.url:
        entry["url"] = server.url
    if server.headers:
        entry["headers"] = dict.fromkeys(server.headers, "")
    if not server.is_on:
        entry["disabled"] = True
    if server.hidden:
        entry["hiddenTools"] = list(server.hidden)
    return entry


def _texts(name: str, entry: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return a list of texts of an entry; () where there is none."""
    found = entry.get(key) or []
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise EngineError(
            tr("“{key}” of {name} is not a list of texts.").format(key=key, name=name)
        )
    return tuple(found)


def _pairs(name: str, entry: Mapping[str, Any], key: str) -> dict[str, str]:
    """Return an object of texts of an entry; {} where there is none."""
    found = entry.get(key) or {}
    is_fine = isinstance(found, dict) and all(
        isinstance(value, str | int | float) for value in found.values()
    )
    if not is_fine:
        raise EngineError(
            tr("“{key}” of {name} is not an object of texts.").format(key=key, name=name)
        )
    return {word: str(value) for word, value in found.items()}


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
