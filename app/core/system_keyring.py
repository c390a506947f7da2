"""Named secrets, in the system's keyring or in a file that only this user can read.

The keyring may be missing, or may ask the user to unlock it.
"""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Literal

from engine import atomic_write, make_private, read_file

log = logging.getLogger(__name__)

SERVICE = "Tandem"

MAX_FILE = 1 << 20

IN_KEYRING = ""
"""Value in the file for a secret in the keyring; only such secrets are looked up in the keyring."""

Place = Literal["keyring", "file", "nowhere"]
"""Where a secret is stored; "nowhere" means that it is kept until the program ends."""


class SecretStore:
    """Named secrets; the names are public.

    Only `has` may be called on the GUI thread, since the keyring may ask the user to unlock it.

    Args:
        file: file with all names, and with the secrets that are not in the keyring.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}

    def has(self, name: str) -> bool:
        return bool(self._known.get(name)) or name in self._read()

    def get(self, name: str) -> str:
        """Return a secret, or ""."""
        with self._lock:
            if name not in self._known:
                kept = self._read()
                secret = kept.get(name, "")
                if name in kept and secret == IN_KEYRING:
                    secret = read_secret(name)
                self._known[name] = secret
            return self._known[name]

    def put(self, name: str, secret: str) -> Place:
        """Store a secret, or delete it if `secret` is ""; return where it is stored."""
        with self._lock:
            self._known[name] = secret
            kept = self._read()
            if not secret:
                if kept.pop(name, None) == IN_KEYRING:
                    keep_secret(name, "")
                self._write(kept)
                return "nowhere"
            in_keyring = keep_secret(name, secret)
            kept[name] = IN_KEYRING if in_keyring else secret
            is_written = self._write(kept)
            if not is_written:
                return "nowhere"
            return "keyring" if in_keyring else "file"

    def _read(self) -> dict[str, str]:
        try:
            data = json.loads(read_file(self._file, MAX_FILE))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.info("%s cannot be read: %s", self._file.name, type(error).__name__)
            return {}
        pairs = data.items() if isinstance(data, dict) else ()
        return {name: secret for name, secret in pairs if isinstance(secret, str)}

    def _write(self, kept: dict[str, str]) -> bool:
        try:
            make_private(self._file.parent)
            with atomic_write(self._file) as file:
                file.write(json.dumps(kept, indent=2).encode())
        except OSError as error:
            log.info("%s cannot be written: %s", self._file.name, error.strerror)
            return False
        return True


def read_secret(name: str) -> str:
    """Return a secret from the keyring, or ""."""
    import keyring

    try:
        return keyring.get_password(SERVICE, name) or ""
    except Exception as error:  # noqa: BLE001 desktop services fail in many ways
        log.info("the keyring cannot be read: %s", type(error).__name__)
        return ""


def keep_secret(name: str, secret: str) -> bool:
    """Store a secret in the keyring, or delete it if `secret` is ""; return whether this worked."""
    import keyring
    from keyring.errors import KeyringError, PasswordDeleteError

    try:
        if secret:
            keyring.set_password(SERVICE, name, secret)
        else:
            keyring.delete_password(SERVICE, name)
    except PasswordDeleteError:  # there was none to delete
        return True
    except KeyringError as error:
        log.info("the keyring cannot be used: %s", type(error).__name__)
        return False
    except Exception as error:  # noqa: BLE001 desktop services fail in many ways
        log.info("the keyring has failed: %s", type(error).__name__)
        return False
    return True
