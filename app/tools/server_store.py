"""Tool servers: configuration file, secret headers, and states."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from app.core.system_keyring import Place, SecretStore
from app.core.translation import tr
from engine import EngineError, Tool, atomic_write, make_private, one_line, read_file

MAX_NAME: Final = 64

MAX_MESSAGE: Final = 8 << 20  # maximum size of a server's message, in bytes or characters


@dataclass(frozen=True, slots=True)
class ToolServer:
    """Configuration of an MCP server: a program or a URL.

    Attributes:
        name: its unique name.
        command: program and arguments; () for a URL.
        environment: additional environment variables for the program.
        folder: working directory for the program; "" for the app's.
        url: address; "" for a program.
        headers: request headers; the value "" stands for a stored secret.
        is_on: whether it is enabled.
        hidden: names of its tools that are hidden from models.
    """

    name: str
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    is_on: bool = True
    hidden: tuple[str, ...] = ()

    def connects_like(self, other: ToolServer) -> bool:
        """Return whether both servers need the same connection."""
        return (self.command, self.environment, self.folder, self.url, self.headers) == (
            other.command, other.environment, other.folder, other.url, other.headers,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits for one server.

    Attributes:
        start_s: timeout for connecting and listing tools, including the program's installation.
        silence_s: timeout for a call, restarted by each progress notification.
        most_result: maximum length of a result, in characters.
        most_tools: maximum number of tools that are read.
    """

    start_s: float = 90.0
    silence_s: float = 300.0
    most_result: int = 256 << 10
    most_tools: int = 1000


LISTS: Final = ("mcpServers", "servers", "mcp_servers")
URLS: Final = ("url", "serverUrl", "httpUrl")
MAX_SERVERS: Final = 200
MAX_TEXT: Final = 1 << 20

EXAMPLE: Final = '{"mcpServers": {"name": {"command": "…"}}}'


def servers_in(text: str) -> tuple[ToolServer, ...]:
    """Parse the servers in a JSON text.

    Raises:
        EngineError: the text or one of its servers is invalid.
    """
    try:
        document = json.loads(text[:MAX_TEXT])
    except (ValueError, RecursionError) as error:
        why = one_line(str(error), 100)
        raise EngineError(tr("This is not valid JSON: {why}.").format(why=why)) from None
    entries = _entries(document)
    if not entries:
        raise EngineError(
            tr("This text contains no server."),
            tr("It should look like {example}.").format(example=EXAMPLE),
        )
    return tuple(_server(name, entry) for name, entry in list(entries.items())[:MAX_SERVERS])


def servers_json(servers: Sequence[ToolServer]) -> dict[str, Any]:
    """Return servers in the format that `servers_in` reads, without header values."""
    return {"mcpServers": {server.name: _entry(server) for server in servers}}


def checked_server(server: ToolServer) -> ToolServer:
    """Validate a server and return it.

    Raises:
        EngineError: it is invalid.
    """
    if not server.name or len(server.name) > MAX_NAME or not server.name.isprintable():
        text = tr("A server needs a name of at most {n} characters.")
        raise EngineError(text.format(n=MAX_NAME))
    if not server.command and not server.url:
        text = tr("{name} needs a command or an address.")
        raise EngineError(text.format(name=server.name))
    if server.url and not _is_address(server.url):
        text = tr("{url} is not a valid http:// or https:// address.")
        raise EngineError(text.format(url=one_line(server.url, 100)))
    for key, value in (*server.environment.items(), *server.headers.items()):
        if not key or "\0" in key + value or ("=" in key and key in server.environment):
            raise EngineError(
                tr("“{name}” is not a valid variable name.").format(name=one_line(key, 60))
            )
    for key, value in server.headers.items():
        if not (key + value).isascii() or not (key + value).isprintable() or ":" in key:
            text = tr("The header {name} contains invalid characters.")
            raise EngineError(text.format(name=one_line(key, 60)))
    if any("\0" in word for word in server.command) or (server.command and not server.command[0]):
        raise EngineError(tr("{name} has no usable command.").format(name=server.name))
    return server


def _entries(document: Any) -> Mapping[str, Any]:
    if not isinstance(document, dict):
        return {}
    for key in LISTS:
        if isinstance(document.get(key), dict):
            return dict(document[key])
    if isinstance(document.get("command"), str) or any(key in document for key in URLS):
        name = document.get("name")
        return {name if isinstance(name, str) else tr("Server"): document}
    return {key: entry for key, entry in document.items() if isinstance(entry, dict)}


def _server(name: str, entry: Any) -> ToolServer:
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
    value = entry.get(key) or []
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise EngineError(
            tr("“{key}” in {name} is not a list of strings.").format(key=key, name=name)
        )
    return tuple(value)


def _pairs(name: str, entry: Mapping[str, Any], key: str) -> dict[str, str]:
    pairs = entry.get(key) or {}
    is_valid = isinstance(pairs, dict) and all(
        isinstance(value, str | int | float) for value in pairs.values()
    )
    if not is_valid:
        raise EngineError(
            tr("“{key}” in {name} is not an object with string values.").format(key=key, name=name)
        )
    return {word: str(value) for word, value in pairs.items()}


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


log = logging.getLogger(__name__)


class ToolServerStore:
    """The configuration file, private to this user because environment variables may hold keys.

    Args:
        file: JSON file in the format of `servers_json`.
        secrets: store for header values.
    """

    def __init__(self, file: Path, secrets: SecretStore) -> None:
        self._file, self._secrets = file, secrets

    def load(self) -> tuple[ToolServer, ...]:
        """Return the servers; rename an invalid file."""
        try:
            text = read_file(self._file, MAX_TEXT).decode()
            has_any = bool(json.loads(text).get("mcpServers"))
            return servers_in(text) if has_any else ()
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, AttributeError, RecursionError, EngineError) as error:
            log.info("the list of tool servers could not be read and was renamed: %s", error)
            self._set_aside()
            return ()

    def save(self, servers: Sequence[ToolServer]) -> None:
        """Write the servers, without header values.

        Raises:
            OSError: writing failed.
        """
        make_private(self._file.parent)
        text = json.dumps(servers_json(servers), ensure_ascii=False, indent=1)
        with atomic_write(self._file) as file:
            file.write(text.encode(errors="surrogatepass"))

    # these may block on the keyring, so the GUI thread must not call them

    def headers_of(self, server: ToolServer) -> Mapping[str, str]:
        """Return a server's headers with stored values filled in, omitting empty ones."""
        stored = self._stored(server.name)
        headers = {name: value or stored.get(name, "") for name, value in server.headers.items()}
        return {name: value for name, value in headers.items() if value}

    def keep_secrets(self, server: ToolServer, old: ToolServer | None = None) -> Place:
        """Store a server's header values; return where they are kept, or "keyring" if none.

        Args:
            old: the replaced server, whose stored values are kept for empty headers.
        """
        stored = self._stored((old or server).name)
        headers = {name: value or stored.get(name, "") for name, value in server.headers.items()}
        headers = {name: value for name, value in headers.items() if value}
        if old is not None and old.name != server.name:
            self.forget(old.name)
        if not headers:
            self.forget(server.name)
            return "keyring"
        return self._secrets.put(_secret_name(server.name), json.dumps(headers))

    def forget(self, name: str) -> None:
        """Delete a server's secrets."""
        self._secrets.put(_secret_name(name), "")

    def _stored(self, name: str) -> dict[str, str]:
        try:
            document = json.loads(self._secrets.get(_secret_name(name)) or "{}")
        except (ValueError, RecursionError):
            document = {}
        pairs = document.items() if isinstance(document, dict) else ()
        return {key: value for key, value in pairs if isinstance(value, str)}

    def _set_aside(self) -> None:
        try:
            self._file.replace(self._file.with_name(self._file.name + ".broken"))
        except OSError as error:
            log.info("the invalid file cannot be renamed: %s", error)


def _secret_name(server: str) -> str:
    return f"headers of {server}"


def split_command(text: str, *, is_windows: bool = sys.platform == "win32") -> tuple[str, ...]:
    """Split a command line; quotes protect spaces.

    Args:
        is_windows: whether a backslash is an ordinary character.

    Raises:
        EngineError: a quote is not closed.
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    if is_windows:
        lexer.escape, lexer.quotes = "", '"'
    try:
        return tuple(lexer)
    except ValueError:
        raise EngineError(tr("A quote in the command is not closed.")) from None


def join_command(words: tuple[str, ...], *, is_windows: bool = sys.platform == "win32") -> str:
    """Join words into a command line; the inverse of `split_command`."""
    if not is_windows:
        return shlex.join(words)
    return " ".join(
        f'"{word}"' if not word or " " in word or "\t" in word else word for word in words
    )


ServerStatus = Literal["off", "starting", "ready", "failed"]


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool on a server.

    Attributes:
        server: name of its server.
        name: its name on the server.
        tool: declaration for models; `tool.name` is unique across all servers.
        title: display name.
        is_read_only: the server's `readOnlyHint`; None if unknown.
    """

    server: str
    name: str
    tool: Tool
    title: str = ""
    is_read_only: bool | None = None


@dataclass(frozen=True, slots=True)
class ToolServerState:
    """A server and its connection.

    Attributes:
        problem: why the connection failed, or "".
        tools: all the server's tools, including hidden ones; () unless it is ready.
    """

    server: ToolServer
    status: ServerStatus
    problem: str = ""
    tools: tuple[ServerTool, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a tool call: text for the model."""

    text: str
    is_error: bool = False
