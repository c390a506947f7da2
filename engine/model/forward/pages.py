"""Keys of pages: a page's key stands for its tokens and for all before them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
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
