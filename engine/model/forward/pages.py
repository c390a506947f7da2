"""Keys of pages: a page's key stands for its tokens and for all before them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

PAGE = 256
"""Tokens of a page."""

GONE = -1
"""Entry of a page table in place of a page that no token will see again."""

ROOT = b""
"""Key of what is before the first page."""


def page_key(before: bytes, ids: Sequence[int]) -> bytes:
    """Return the key of a whole page.

    Args:
        before: key of the page before, or `ROOT`.
        ids: the page's tokens.
    """
    return blake2b(before + array("q", ids).tobytes(), digest_size=16).digest()


def page_keys(ids: Sequence[int], known: Sequence[bytes] = ()) -> list[bytes]:
    """Return the keys of all whole pages of a sequence.

    Args:
        known: keys of its first pages, which are not computed again.
    """
    keys = list(known)
    for start in range(len(keys) * PAGE, len(ids) - PAGE + 1, PAGE):
        keys.append(page_key(keys[-1] if keys else ROOT, ids[start : start + PAGE]))
    return keys


def n_alike(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """Attention window of a group of layers: how far back its tokens see.

    Attributes:
        n: number of tokens; None for all.
        is_chunked: whether the tokens are cut in chunks of `n`, each of which sees its own
            beginning (Llama 4); else each token sees the last `n`, itself included.
    """

    n: int | None = None
    is_chunked: bool = False

    def first_seen(self, position: int) -> int:
        """Return the first position that the token at a position sees."""
        if self.n is None:
            return 0
        if self.is_chunked:
            return position // self.n * self.n
        return max(0, position - self.n + 1)

    def n_pages(self, n_ctx: int, n_batch: int) -> int:
        """Return how many pages a sequence of `n_ctx` tokens uses at once, at most.

        Args:
            n_batch: largest number of tokens that are computed at once.
        """
        whole = -(-n_ctx // PAGE)
        if self.n is None:
            return whole
        return min(whole, -(-(self.n + n_batch - 2) // PAGE) + 1)


NO_WINDOW = AttentionWindow()
"""Window of layers that attend to the whole sequence."""


def in_order(windows: Iterable[AttentionWindow]) -> tuple[AttentionWindow, ...]:
    """Return each window once: the unlimited one first, then the others, the widest first."""
    return tuple(sorted(set(windows), key=lambda s: (s.n is not None, -(s.n or 0), s.is_chunked)))
