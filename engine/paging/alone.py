"""Tables of a sequence that has all pages of a cache to itself."""

from __future__ import annotations

from collections.abc import Sequence

from engine.paging.keys import PAGE
from engine.paging.sight import Sight


def tables_alone(n_pages: Sequence[int], n: int) -> tuple[list[int], ...]:
    """Return the table of each group for n tokens: what layers see no more is overwritten.

    Args:
        n_pages: number of pages of each group.
    """
    return tuple([i % most for i in range(-(-n // PAGE))] for most in n_pages)


def is_kept(n_pages: int, sight: Sight, n_computed: int, n: int) -> bool:
    """Return whether `tables_alone` still has all that the token behind the first n sees.

    Args:
        n_pages: number of pages of a group.
        sight: how far back its layers see.
        n_computed: number of tokens that were computed.
    """
    first_page = max(0, -(-n_computed // PAGE) - n_pages)
    return sight.first_seen(n) >= first_page * PAGE
