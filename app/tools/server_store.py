"""Tool servers: the file they are kept in, the secrets of their headers, their states."""

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

MAX_MESSAGE: Final = 8 << 20
"""Size of the largest message of a server, in bytes or characters."""


@dataclass(frozen=True, slots=True)
class ToolServer:
    """A program, or an address, that offers tools by the Model Context Protocol.

    Attributes:
        name: what the person calls it; no two have one name.
        command: program and its arguments; () for a server at an address.
        environment: variables of the program, beside the few that it gets anyhow.
        folder: where the program runs; "" for the folder that the app runs in.
        url: address; "" for a program.
        headers: what each request to the address has; "" stands for a value that is kept as a
            secret.
        is_on: whether it is used.
        hidden: names of its tools that models are not told of.
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
        """Return whether a connection to one is a connection to the other."""
        return (self.command, self.environment, self.folder, self.url, self.headers) == (
            other.command, other.environment, other.folder, other.url, other.headers,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits for one server.

    Attributes:
        start_s: seconds in which a server must have listed its tools; programs may have to be
            fetched first.
        silence_s: seconds of a call without a sign of progress.
        most_result: size limit of a result, in characters.
        most_tools: number of tools beyond which no more are read.
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
    """Return the servers that a JSON text names.

    Raises:
        EngineError: it is no such text, or one of its servers cannot be used.
    """
    try:
        found = json.loads(text[:MAX_TEXT])
    except (ValueError, RecursionError) as error:
        why = one_line(str(error), 100)
        raise EngineError(tr("This is not JSON: {why}.").format(why=why)) from None
    entries = _entries(found)
    if not entries:
        raise EngineError(
            tr("There is no server in this text."),
            tr("It should look like {example}.").format(example=EXAMPLE),
        )
    return tuple(_server(name, entry) for name, entry in list(entries.items())[:MAX_SERVERS])


def servers_json(servers: Sequence[ToolServer]) -> dict[str, Any]:
    """Return servers as a value that `servers_in` reads from its JSON; without headers' values."""
    return {"mcpServers": {server.name: _entry(server) for server in servers}}


def checked_server(server: ToolServer) -> ToolServer:
    """Return a server that can be used.

    Raises:
        EngineError: it has no name, neither a program nor an address, or text that is none.
    """
    if not server.name or len(server.name) > MAX_NAME or not server.name.isprintable():
        text = tr("A server needs a name of at most {n} characters.")
        raise EngineError(text.format(n=MAX_NAME))
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


log = logging.getLogger(__name__)


class ToolServerStore:
    """The file of servers, which only this user can read: their variables may hold keys.

    Args:
        file: JSON file, as `server_json` has it.
        secrets: where the values of headers are.
    """

    def __init__(self, file: Path, secrets: SecretStore) -> None:
        self._file, self._secrets = file, secrets

    def load(self) -> tuple[ToolServer, ...]:
        """Return the servers; a damaged file is set aside."""
        try:
            text = read_file(self._file, MAX_TEXT).decode()
            has_any = bool(json.loads(text).get("mcpServers"))
            return servers_in(text) if has_any else ()
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, AttributeError, RecursionError, EngineError) as error:
            log.info("servers of tools could not be read and are set aside: %s", error)
            self._set_aside()
            return ()

    def save(self, servers: Sequence[ToolServer]) -> None:
        """Write the servers, without the values of headers.

        Raises:
            OSError: the file cannot be written.
        """
        make_private(self._file.parent)
        text = json.dumps(servers_json(servers), ensure_ascii=False, indent=1)
        with atomic_write(self._file) as file:
            file.write(text.encode(errors="surrogatepass"))

    # waits for the keyring, so not on the GUI thread

    def headers_of(self, server: ToolServer) -> Mapping[str, str]:
        """Return the headers of a server with their values; without those that have none."""
        kept = self._kept(server.name)
        found = {name: value or kept.get(name, "") for name, value in server.headers.items()}
        return {name: value for name, value in found.items() if value}

    def keep_secrets(self, server: ToolServer, old: ToolServer | None = None) -> Place:
        """Keep the values of a server's headers.

        Args:
            old: the server that it replaces, whose values those headers have that bring none.

        Returns:
            where they are kept; "keyring" if there are none.
        """
        known = self._kept((old or server).name)
        headers = {name: value or known.get(name, "") for name, value in server.headers.items()}
        headers = {name: value for name, value in headers.items() if value}
        if old is not None and old.name != server.name:
            self.forget(old.name)
        if not headers:
            self.forget(server.name)
            return "keyring"
        return self._secrets.put(_secret_name(server.name), json.dumps(headers))

    def forget(self, name: str) -> None:
        """Forget the secrets of a server."""
        self._secrets.put(_secret_name(name), "")

    def _kept(self, name: str) -> dict[str, str]:
        try:
            found = json.loads(self._secrets.get(_secret_name(name)) or "{}")
        except (ValueError, RecursionError):
            found = {}
        pairs = found.items() if isinstance(found, dict) else ()
        return {key: value for key, value in pairs if isinstance(value, str)}

    def _set_aside(self) -> None:
        try:
            self._file.replace(self._file.with_name(self._file.name + ".broken"))
        except OSError as error:
            log.info("the broken file stays in place: %s", error)


def _secret_name(server: str) -> str:
    return f"headers of {server}"


def split_command(text: str, *, is_windows: bool = sys.platform == "win32") -> tuple[str, ...]:
    """Return the words of a line; quotes keep words with spaces together.

    Args:
        is_windows: whether a backslash is a letter, as in paths there.

    Raises:
        EngineError: a quote has no end.
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    if is_windows:
        lexer.escape, lexer.quotes = "", '"'
    try:
        return tuple(lexer)
    except ValueError:
        raise EngineError(tr("A quote in the command has no end.")) from None


def join_command(words: tuple[str, ...], *, is_windows: bool = sys.platform == "win32") -> str:
    """Return a line that `split_command` reads as these words."""
    if not is_windows:
        return shlex.join(words)
    return " ".join(
        f'"{word}"' if not word or " " in word or "\t" in word else word for word in words
    )


ServerStatus = Literal["off", "starting", "ready", "failed"]


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool of a server.

    Attributes:
        server: name of its server.
        name: its name at the server.
        tool: what models are told of it; `tool.name` is unique among the tools of all servers.
        title: what people call it; its name where the server has no other.
        is_read_only: whether the server says that it changes nothing; None where it says nothing.
    """

    server: str
    name: str
    tool: Tool
    title: str = ""
    is_read_only: bool | None = None


@dataclass(frozen=True, slots=True)
class ToolServerState:
    """A server and what became of it.

    Attributes:
        problem: why it has failed, in a sentence; "" if it has not.
        tools: all that it has, also those that are hidden; () unless it is ready.
    """

    server: ToolServer
    status: ServerStatus
    problem: str = ""
    tools: tuple[ServerTool, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came of a call: text for the model, or why there is none."""

    text: str
    is_error: bool = False
