"""The servers of tools that a person has added: their file, and the secrets of their headers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.core.system_keyring import Place, SecretStore
from app.tools.server_json import MOST_TEXT, servers_in, servers_json
from app.tools.tool_server import ToolServer
from engine import EngineError, atomic_write, make_private, read_file

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
            text = read_file(self._file, MOST_TEXT).decode()
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
