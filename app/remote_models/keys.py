"""The keys of servers: in the system's keyring, else in a file that this user alone can read."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Literal

from app.remote_models.address import RemoteAddress
from app.system_keyring import keep_secret, read_secret
from app.translation import tr
from engine import EngineError, atomic_write, make_private

log = logging.getLogger(__name__)

LONGEST_KEY = 4096
MOST_FILE = 1 << 20

IN_KEYRING = ""
"""What stands in the file for a key that the keyring has, so that others are not looked for."""

Place = Literal["keyring", "file", "nowhere"]
"""Where a key is kept; "nowhere" is until the program ends."""


class KeyStore:
    """Keys by the addresses of their servers.

    The keyring may ask the person to unlock it, so no method but `has` is for the GUI thread.

    Args:
        file: file of the servers that have keys, and of the keys that no keyring has.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}

    def has(self, address: RemoteAddress) -> bool:
        """Return whether there is a key for a server."""
        return bool(self._known.get(address.url)) or address.url in self._read()

    def get(self, address: RemoteAddress) -> str:
        """Return the key of a server; "" for none."""
        with self._lock:
            if address.url not in self._known:
                kept = self._read()
                key = kept.get(address.url, "")
                if address.url in kept and key == IN_KEYRING:
                    key = read_secret(address.url)
                self._known[address.url] = key
            return self._known[address.url]

    def put(self, address: RemoteAddress, key: str) -> Place:
        """Keep the key of a server, or forget it for ""; return where it is kept.

        Raises:
            EngineError: it is no key.
        """
        key = cleaned_key(key)
        with self._lock:
            self._known[address.url] = key
            kept = self._read()
            if not key:
                if kept.pop(address.url, None) == IN_KEYRING:
                    keep_secret(address.url, "")
                self._write(kept)
                return "nowhere"
            in_keyring = keep_secret(address.url, key)
            kept[address.url] = IN_KEYRING if in_keyring else key
            is_written = self._write(kept)
            if not is_written:
                return "nowhere"
            return "keyring" if in_keyring else "file"

    def _read(self) -> dict[str, str]:
        try:
            with self._file.open("rb") as file:
                data = json.loads(file.read(MOST_FILE))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.info("the keys of servers cannot be read: %s", type(error).__name__)
            return {}
        pairs = data.items() if isinstance(data, dict) else ()
        return {url: key for url, key in pairs if isinstance(key, str)}

    def _write(self, kept: dict[str, str]) -> bool:
        """Write the file, which nobody else can read; return whether that has worked."""
        try:
            make_private(self._file.parent)
            with atomic_write(self._file) as file:
                file.write(json.dumps(kept, indent=2).encode())
        except OSError as error:
            log.info("the keys of servers cannot be written: %s", error.strerror)
            return False
        return True


def cleaned_key(text: str) -> str:
    """Return a key as it is sent, without the spaces and line ends of a paste.

    Raises:
        EngineError: it is no key.
    """
    key = "".join(text.split())
    if len(key) > LONGEST_KEY or not (key.isascii() and key.isprintable()):
        raise EngineError(tr("This is no API key."), tr("Copy it again from where you got it."))
    return key
