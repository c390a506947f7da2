"""The keys of servers: in the system's keyring, else in a file that this user alone can read."""

from __future__ import annotations

from pathlib import Path

from app.core.system_keyring import Place, SecretStore
from app.core.translation import tr
from app.remote.client.address import RemoteAddress
from engine import EngineError

LONGEST_KEY = 4096


class KeyStore:
    """Keys by the addresses of their servers.

    The keyring may ask the person to unlock it, so no method but `has` is for the GUI thread.

    Args:
        file: file of the servers that have keys, and of the keys that no keyring has.
    """

    def __init__(self, file: Path) -> None:
        self._secrets = SecretStore(file)

    def has(self, address: RemoteAddress) -> bool:
        """Return whether there is a key for a server."""
        return self._secrets.has(address.url)

    def get(self, address: RemoteAddress) -> str:
        """Return the key of a server; "" for none."""
        return self._secrets.get(address.url)

    def put(self, address: RemoteAddress, key: str) -> Place:
        """Keep the key of a server, or forget it for ""; return where it is kept.

        Raises:
            EngineError: it is no key.
        """
        return self._secrets.put(address.url, cleaned_key(key))


def cleaned_key(text: str) -> str:
    """Return a key as it is sent, without the spaces and line ends of a paste.

    Raises:
        EngineError: it is no key.
    """
    key = "".join(text.split())
    if len(key) > LONGEST_KEY or not (key.isascii() and key.isprintable()):
        raise EngineError(tr("This is no API key."), tr("Copy it again from where you got it."))
    return key
