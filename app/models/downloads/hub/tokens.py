"""The token of a person's account, in the system's keyring; nowhere else on the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable

from app.core.system_keyring import keep_secret, read_secret


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
                self._mine = read_secret(self._endpoint)
            return self._mine or self._other()

    def put(self, token: str) -> bool:
        """Use another token, or none for ""; return whether the keyring has it.

        Without a keyring it is used until the program ends.
        """
        with self._lock:
            self._mine = "".join(token.split())
            return keep_secret(self._endpoint, self._mine)
