"""The pages of one group of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.model.forward.pages import PAGE, n_alike, page_key


class OutOfPages(Exception):
    """Error of a pool all of whose pages are used by sequences."""


class Content(NamedTuple):
    """What a page holds.

    Attributes:
        before: key of the page before.
        ids: tokens; fewer than `PAGE` if the rest of the page may be anything.
    """

    before: bytes
    ids: tuple[int, ...]


class PagePool:
    """The pages of one group of layers.

    A page is *used* while sequences count it, and *known* while it can be found by its content. A
    known page that nobody uses is *idle*: it stays until its memory is wanted. The page that was
    released first goes first, so a sequence that releases its last page first loses its end before
    its beginning, which others may share. Before all of them go pages that a sequence has *passed*:
    its window has left them, and only who goes back as far would look for them.

    Args:
        n_pages: number of pages.
    """

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self._n_users = [0] * n_pages
        self._empty = list(reversed(range(n_pages)))
        self._passed: dict[int, None] = {}  # in the order in which they were released
        self._idle: dict[int, None] = {}  # so are these
        self._contents: dict[int, Content] = {}
        self._whole: dict[bytes, int] = {}
        self._behind: dict[bytes, dict[int, None]] = {}

    @property
    def n_free(self) -> int:
        """Number of pages that `take` can return before a sequence releases some."""
        return len(self._empty) + self.n_idle

    @property
    def n_idle(self) -> int:
        """Number of known pages that no sequence uses."""
        return len(self._passed) + len(self._idle)

    @property
    def n_known(self) -> int:
        """Number of pages that can be found by their content."""
        return len(self._contents)

    @property
    def known(self) -> list[int]:
        """Pages that can be found by their content, in order."""
        return sorted(self._contents)

    def n_users(self, page: int) -> int:
        """Return how many sequences use a page."""
        return self._n_users[page]

    def content(self, page: int) -> Content | None:
        """Return what a page is known to hold."""
        return self._contents.get(page)

    def take(self) -> int:
        """Return a page that nobody uses and nobody finds any more; the caller uses it.

        Raises:
            OutOfPages: there is none.
        """
        if self._empty:
            page = self._empty.pop()
        elif waiting := self._passed or self._idle:
            page = next(iter(waiting))
            del waiting[page]
            self.forget(page)
        else:
            raise OutOfPages
        self._n_users[page] = 1
        return page

    def use(self, page: int) -> None:
        """Count one more user of a known page."""
        assert page in self._contents, "only what is known can be shared"
        self._passed.pop(page, None)
        self._idle.pop(page, None)
        self._n_users[page] += 1

    def release(self, pages: Iterable[int], *, is_passed: bool = False) -> None:
        """Count one user less of each page; those known to be good stay until they are wanted.

        Args:
            is_passed: whether the user's window has left them.
        """
        for page in pages:
            assert self._n_users[page] > 0, "nobody uses this page"
            self._n_users[page] -= 1
            if self._n_users[page]:
                continue
            if page in self._contents:
                (self._passed if is_passed else self._idle)[page] = None
            else:
                self._empty.append(page)

    def note(self, page: int, before: bytes, ids: Sequence[int]) -> None:
        """Make a used page known by what it holds, in place of what was known.

        A whole page whose twin is known already is not: one is enough to be found.
        """
        assert self._n_users[page], "only its user knows what a page holds"
        self.forget(page)
        if len(ids) == PAGE:
            key = page_key(before, ids)
            if key in self._whole:
                return
            self._whole[key] = page
        self._contents[page] = Content(before, tuple(ids))
        self._behind.setdefault(before, {})[page] = None

    def forget(self, page: int) -> None:
        """Make sure that nobody finds a page any more."""
        content = self._contents.pop(page, None)
        if content is None:
            return
        if len(content.ids) == PAGE:
            del self._whole[page_key(*content)]
        twins = self._behind[content.before]
        del twins[page]
        if not twins:
            del self._behind[content.before]

    def whole(self, key: bytes) -> int | None:
        """Return the page with a key; None if there is none."""
        return self._whole.get(key)

    def best(self, before: bytes, ids: Sequence[int]) -> tuple[int, int]:
        """Return the page behind `before` that begins most like `ids`, and the tokens in common.

        Among pages with equally many, idle ones come first, then those with fewer other tokens.

        Returns:
            (-1, 0) if none has a token in common.
        """
        best, rank = -1, (0, False, 0)
        for page in self._behind.get(before, ()):
            found = self._contents[page].ids
            n = n_alike(found, ids)
            mine = (n, not self._n_users[page], -len(found))
            if n and mine > rank:
                best, rank = page, mine
        return best, rank[0]

    def clear(self) -> None:
        """Make sure that no page is found, such as after a failure that may have spoilt some."""
        for page in list(self._contents):
            self.forget(page)
        self._empty.extend((*self._passed, *self._idle))
        self._passed.clear()
        self._idle.clear()
