"""States of recurrent layers that were kept at some lengths of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from engine.model.forward.pages import PAGE, ROOT, page_keys

T = TypeVar("T")


class _Kept(NamedTuple, Generic[T]):
    """A state that was kept, and its bytes."""

    state: T
    n_bytes: int


class Checkpoints(Generic[T]):
    """States of recurrent layers that were kept at some lengths of sequences.

    Keys and values can be cut at any token, a recurrent state cannot: a sequence goes on from where
    one was kept. Those used longest ago go first.

    Args:
        most_bytes: largest number of bytes of all states.

    Attributes:
        n_bytes: bytes of the states that are kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self.n_bytes = 0
        self._most_bytes = most_bytes
        self._kept: dict[tuple[bytes, tuple[int, ...]], _Kept[T]] = {}  # used longest ago first
        self._parts: dict[bytes, set[tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, ids: Sequence[int], state: T, n_bytes: int) -> bool:
        """Keep the state behind `ids`, in place of others if need be.

        Returns:
            False if it is larger than all of them may be.
        """
        before, part = key = _key(ids)
        self._drop(key)
        if n_bytes > self._most_bytes:
            return False
        while self.n_bytes + n_bytes > self._most_bytes:
            self._drop(next(iter(self._kept)))
        self._kept[key] = _Kept(state, n_bytes)
        self._parts.setdefault(before, set()).add(part)
        self.n_bytes += n_bytes
        return True

    def lengths(self, ids: Sequence[int]) -> list[int]:
        """Return at which lengths of a sequence a state is kept, the longest first."""
        found = (
            n_whole * PAGE + len(part)
            for n_whole, before in enumerate([ROOT, *page_keys(ids)])
            for part in self._parts.get(before, ())
            if tuple(ids[n_whole * PAGE :][: len(part)]) == part
        )
        return sorted(found, reverse=True)

    def state(self, ids: Sequence[int]) -> T:
        """Return the state behind `ids`, which is used now.

        Raises:
            KeyError: none is kept there.
        """
        key = _key(ids)
        kept = self._kept.pop(key)
        self._kept[key] = kept
        return kept.state

    def clear(self) -> None:
        """Drop all states."""
        self._kept.clear()
        self._parts.clear()
        self.n_bytes = 0

    def _drop(self, key: tuple[bytes, tuple[int, ...]]) -> None:
        """Drop a state, if there is one."""
        kept = self._kept.pop(key, None)
        if kept is None:
            return
        before, part = key
        self.n_bytes -= kept.n_bytes
        self._parts[before].discard(part)
        if not self._parts[before]:
            del self._parts[before]


def _key(ids: Sequence[int]) -> tuple[bytes, tuple[int, ...]]:
    """Return the key of the last whole page, and the tokens behind it."""
    keys = page_keys(ids)
    return (keys[-1] if keys else ROOT), tuple(ids[len(keys) * PAGE :])
