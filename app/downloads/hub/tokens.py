"""The token of a person's account, in the system's keyring; nowhere else on the disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

SERVICE = "Tandem"


class TokenStore:
    """The token that was entered here, else the one that the hub's own programs use.

    The keyring may ask the person to unlock it, so no method is for the GUI thread.

    Args:
        endpoint: address of the hub that the token belongs to.
        other: returns the token of the hub's programs; "" for none.
    """

    def __init__(self, endpoint: str, other: Callable[[], str]) -> None:
        self._endpoint, self._other = endpoint, other
        self._lock = threading.Lock()
        self._mine: str | None = None  # not read yet

    def get(self) -> str:
        """Return the token; "" for none."""
        with self._lock:
            if self._mine is None:
                self._mine = self._read()
            return self._mine or self._other()

    def put(self, token: str) -> bool:
        """Use another token, or none for ""; return whether the keyring has it.

        Without a keyring it is used until the program ends.
        """
        import keyring
        from keyring.errors import KeyringError, PasswordDeleteError

        token = "".join(token.split())
        with self._lock:
            self._mine = token
            try:
                if token:
                    keyring.set_password(SERVICE, self._endpoint, token)
                else:
                    keyring.delete_password(SERVICE, self._endpoint)
            except PasswordDeleteError:  # there was none
                return True
            except KeyringError as error:
                log.info("the keyring cannot be used: %s", type(error).__name__)
                return False
            except Exception as error:  # noqa: BLE001 services of desktops fail in many ways
                log.info("the keyring has failed: %s", type(error).__name__)
                return False
        return True

    def _read(self) -> str:
        import keyring

        try:
            return keyring.get_password(SERVICE, self._endpoint) or ""
        except Exception as error:  # noqa: BLE001 services of desktops fail in many ways
            log.info("the keyring cannot be read: %s", type(error).__name__)
            return ""
