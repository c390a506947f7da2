"""Paged KV cache: page pools, sequences with page tables, and checkpoints of recurrent states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from engine.model.forward.pages import (
    GONE,
    PAGE,
    ROOT,
    AttentionWindow,
    n_alike,
    page_key,
    page_keys,
)


class OutOfPages(Exception):
    """Error for a pool whose pages are all in use."""


class Content(NamedTuple):
    """Content of a page.

    Attributes:
        before: key of the preceding page.
        ids: tokens; fewer than `PAGE` if the rest of the page is undefined.
    """

    before: bytes
    ids: tuple[int, ...]


class PagePool:
    """The pages of one layer group.

    A page is *used* while its reference count is positive, and *known* while it can be found by its
    content. A known, unused page is *idle*: it stays until evicted. Pages are evicted in the order
    in which they were released; a sequence releases its last page first, as others may share its
    beginning. Pages that a sequence has *passed*, as its attention window has moved beyond them,
    are evicted before all others, as only a sequence that goes back that far could reuse them.
    """

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self._n_users = [0] * n_pages
        self._empty = list(reversed(range(n_pages)))
        self._passed: dict[int, None] = {}  # in order of release
        self._idle: dict[int, None] = {}  # also in order of release
        self._contents: dict[int, Content] = {}
        self._whole: dict[bytes, int] = {}
        self._behind: dict[bytes, dict[int, None]] = {}

    @property
    def n_free(self) -> int:
        """Number of pages that `take` can return before any is released."""
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
        """Return the reference count of a page."""
        return self._n_users[page]

    def content(self, page: int) -> Content | None:
        """Return the known content of a page."""
        return self._contents.get(page)

    def take(self) -> int:
        """Return a free page, now used by the caller, evicting an idle one if necessary.

        Raises:
            OutOfPages: there is none.
        """
        if self._empty:
            page = self._empty.pop()
        elif queue := self._passed or self._idle:
            page = next(iter(queue))
            del queue[page]
            self.forget(page)
        else:
            raise OutOfPages
        self._n_users[page] = 1
        return page

    def use(self, page: int) -> None:
        """Increment the reference count of a known page."""
        assert page in self._contents, "only known pages can be shared"
        self._passed.pop(page, None)
        self._idle.pop(page, None)
        self._n_users[page] += 1

    def release(self, pages: Iterable[int], *, is_passed: bool = False) -> None:
        """Decrement reference counts; pages with reusable content stay until evicted.

        Args:
            is_passed: whether the attention window has left the pages.
        """
        for page in pages:
            assert self._n_users[page] > 0, "this page is not in use"
            self._n_users[page] -= 1
            if self._n_users[page]:
                continue
            if page in self._contents:
                (self._passed if is_passed else self._idle)[page] = None
            else:
                self._empty.append(page)

    def note(self, page: int, before: bytes, ids: Sequence[int]) -> None:
        """Register the content of a used page, replacing any earlier one.

        A full page is not registered if another has the same content.
        """
        assert self._n_users[page], "only its user knows the content of a page"
        self.forget(page)
        if len(ids) == PAGE:
            key = page_key(before, ids)
            if key in self._whole:
                return
            self._whole[key] = page
        self._contents[page] = Content(before, tuple(ids))
        self._behind.setdefault(before, {})[page] = None

    def forget(self, page: int) -> None:
        """Unregister a page's content."""
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
        """Return the full page with a key, or None."""
        return self._whole.get(key)

    def best(self, before: bytes, ids: Sequence[int]) -> tuple[int, int]:
        """Return the page after `before` that shares the longest prefix with `ids`, and its length.

        Among pages with equal lengths, idle ones come first, then those with fewer other tokens.

        Returns:
            (-1, 0) if no page shares a token.
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
        """Unregister all pages, for example after a failure that may have corrupted some."""
        for page in list(self._contents):
            self.forget(page)
        self._empty.extend((*self._passed, *self._idle))
        self._passed.clear()
        self._idle.clear()


CopyPage = Callable[[int, int, int], None]
"""Copies a page on all ranks, given the group's index, the source and the target."""


class Group(NamedTuple):
    """Layers with the same attention window, and their pages."""

    pool: PagePool
    window: AttentionWindow = AttentionWindow()


class Sequences:
    """The sequences that share the pages of a cache.

    Args:
        groups: layer groups; in each, a page number refers to different keys and values.
        copy: copies a page synchronously.
    """

    def __init__(self, groups: Sequence[Group], copy: CopyPage) -> None:
        self.groups = tuple(groups)
        self.copy = copy

    def open(self, ids: Sequence[int], lengths: Iterable[int] | None = None) -> PagedSequence:
        """Return a sequence with the longest prefix of `ids` that is in the cache.

        Args:
            lengths: allowed lengths, for example those with a checkpoint; None for any.

        Raises:
            OutOfPages: the page for the last tokens is in use.
        """
        keys = page_keys(ids)
        match = _Match(self.groups, ids, keys)
        candidates = match.lengths() if lengths is None else sorted(lengths, reverse=True)
        n = next((n for n in candidates if n <= len(ids) and match.covers(n)), 0)
        return PagedSequence(self, list(ids[:n]), keys[: n // PAGE])

    def clear(self) -> None:
        """Unregister all pages; sequences in use continue."""
        for group in self.groups:
            group.pool.clear()


class _Match:
    """Prefix of a sequence that is cached in the pages of all groups."""

    def __init__(self, groups: Sequence[Group], ids: Sequence[int], keys: Sequence[bytes]) -> None:
        self._groups, self._ids, self._keys = groups, ids, keys
        self._begins = [_run_begins(group.pool, keys) for group in groups]
        self._n_whole = min(
            (_n_from_start(x) for x, g in zip(self._begins, groups, strict=True) if not g.window.n),
            default=len(keys),
        )

    def lengths(self) -> list[int]:
        start = self._n_whole * PAGE
        before = self._keys[self._n_whole - 1] if self._n_whole else ROOT
        rest = self._ids[start : start + PAGE]
        n_part = min((group.pool.best(before, rest)[1] for group in self._groups), default=0)
        return [start + n_part, *range(start, 0, -PAGE)]

    def covers(self, n: int) -> bool:
        n_whole, n_part = divmod(n, PAGE)
        before = self._keys[n_whole - 1] if n_whole else ROOT
        part = self._ids[n - n_part : n]
        for group, begins in zip(self._groups, self._begins, strict=True):
            first = group.window.first_seen(n)
            if first < n - n_part and begins[n_whole] > first // PAGE:
                return False
            if n_part and first < n and group.pool.best(before, part)[1] < n_part:
                return False
        return True


def _run_begins(pool: PagePool, keys: Sequence[bytes]) -> list[int]:
    begins = [0]
    for i, key in enumerate(keys):
        begins.append(i + 1 if pool.whole(key) is None else begins[-1])
    return begins


def _n_from_start(begins: Sequence[int]) -> int:
    return next((i for i, begin in enumerate(begins) if begin), len(begins)) - 1


class PagedSequence:
    """Tokens of one request, and the pages that hold them.

    Attributes:
        ids: tokens that are in the cache.
        tables: for each group, the page of each `PAGE` tokens, or `GONE`.
    """

    def __init__(self, sequences: Sequences, ids: list[int], keys: list[bytes]) -> None:
        self._groups, self._copy = sequences.groups, sequences.copy
        self.ids = ids
        self._keys = keys
        self.tables: list[list[int]] = [[] for _ in self._groups]
        try:
            for group, table in zip(self._groups, self.tables, strict=True):
                self._share(group, table)
            for number in range(len(self._groups)):
                self._share_part(number)
        except OutOfPages:
            self._release()
            raise

    def reserve(self, n: int, firsts: Sequence[int] = ()) -> None:
        """Reserve pages for n more tokens in each group.

        Args:
            firsts: for each group, the first position that needs a page, if the tokens were
                computed elsewhere and early positions are missing; empty if none are.

        Raises:
            OutOfPages: too many pages are in use; nothing has changed.
        """
        needed = -(-(len(self.ids) + n) // PAGE)
        before = [len(table) for table in self.tables]
        try:
            for number, (group, table) in enumerate(zip(self._groups, self.tables, strict=True)):
                first = firsts[number] // PAGE if firsts else 0
                while len(table) < needed:
                    table.append(GONE if len(table) < first else group.pool.take())
        except OutOfPages:
            for number, length in enumerate(before):
                self._drop_from(number, length)
            raise

    def append(self, ids: Sequence[int]) -> None:
        """Add computed tokens, for which `reserve` has made room.

        Pages that are now full are registered, and those outside the attention window released.
        """
        n_whole = len(self._keys)
        self.ids.extend(ids)
        self._keys = page_keys(self.ids, self._keys)
        for number, group in enumerate(self._groups):
            for index in range(n_whole, len(self._keys)):
                self._note(number, index, PAGE)
            self._let_go(number, group.window.first_seen(len(self.ids)) // PAGE)

    def cut(self, n: int) -> bool:
        """Drop all tokens after the first n; a shared last page is copied.

        Returns:
            False if pages that the next token attends to have been released.

        Raises:
            OutOfPages: the copy needs a page but all are in use; nothing has changed.
        """
        n_whole, n_part = divmod(n, PAGE)
        if not self._sees_all(n):
            return False
        last = [table[n_whole] if n_part else GONE for table in self.tables]
        shared = [page if page != GONE and group.pool.n_users(page) > 1 else GONE
                  for group, page in zip(self._groups, last, strict=True)]  # fmt: skip
        kept = n_whole + bool(n_part)
        for number, (group, page) in enumerate(zip(self._groups, shared, strict=True)):
            has_room = group.pool.n_free or self._is_only_user(number, kept)
            if page != GONE and not has_room:
                raise OutOfPages
        for number, group in enumerate(self._groups):
            self._drop_from(number, kept)
            if shared[number] != GONE:
                self.tables[number][n_whole] = group.pool.take()
                self._copy(number, shared[number], self.tables[number][n_whole])
                group.pool.release([shared[number]])
            elif last[number] != GONE:
                group.pool.forget(last[number])
        del self.ids[n:], self._keys[n_whole:]
        return True

    def close(self) -> None:
        """Release all pages; their content can be found until they are evicted."""
        n_whole, n_part = divmod(len(self.ids), PAGE)
        if n_part:
            for number in range(len(self._groups)):
                self._note(number, n_whole, n_part)
        self._release()

    def _share(self, group: Group, table: list[int]) -> None:
        first = group.window.first_seen(len(self.ids)) // PAGE
        for index, key in enumerate(self._keys):
            page = None if index < first else group.pool.whole(key)
            if page is not None:
                group.pool.use(page)
            table.append(GONE if page is None else page)

    def _share_part(self, number: int) -> None:
        """Use a page that begins with the last tokens, or a copy of it."""
        group, table = self._groups[number], self.tables[number]
        part = self.ids[len(self._keys) * PAGE :]
        if not part:
            return
        if group.window.first_seen(len(self.ids)) >= len(self.ids):
            table.append(group.pool.take())
            return
        page, _ = group.pool.best(self._before(len(self._keys)), part)
        is_idle = not group.pool.n_users(page)
        content = group.pool.content(page)
        assert content is not None, "best pages are known"
        group.pool.use(page)
        table.append(page)
        if is_idle and len(content.ids) == len(part):
            return
        if is_idle and not group.pool.n_free:
            group.pool.forget(page)  # there is nothing to evict, so overwrite it
            return
        table[-1] = GONE
        try:
            table[-1] = group.pool.take()
            self._copy(number, page, table[-1])
        finally:
            group.pool.release([page])

    def _before(self, index: int) -> bytes:
        return self._keys[index - 1] if index else ROOT

    def _note(self, number: int, index: int, n: int) -> None:
        page = self.tables[number][index]
        if page != GONE:
            ids = self.ids[index * PAGE : index * PAGE + n]
            self._groups[number].pool.note(page, self._before(index), ids)

    def _let_go(self, number: int, first: int) -> None:
        table = self.tables[number]
        gone = [index for index in range(min(first, len(table))) if table[index] != GONE]
        pages = [table[index] for index in reversed(gone)]
        self._groups[number].pool.release(pages, is_passed=True)
        for index in gone:
            table[index] = GONE

    def _sees_all(self, n: int) -> bool:
        return all(
            page != GONE
            for group, table in zip(self._groups, self.tables, strict=True)
            for page in table[group.window.first_seen(n) // PAGE : -(-n // PAGE)]
        )

    def _is_only_user(self, number: int, index: int) -> bool:
        """Return whether dropping the pages from an index onwards frees one."""
        pool = self._groups[number].pool
        return any(page != GONE and pool.n_users(page) == 1 for page in self.tables[number][index:])

    def _drop_from(self, number: int, index: int) -> None:
        table = self.tables[number]
        self._groups[number].pool.release(reversed([p for p in table[index:] if p != GONE]))
        del table[index:]

    def _release(self) -> None:
        for number in range(len(self._groups)):
            self._drop_from(number, 0)


T = TypeVar("T")


class _Kept(NamedTuple, Generic[T]):
    state: T
    n_bytes: int


class Checkpoints(Generic[T]):
    """Copies of recurrent states at some sequence lengths, evicted least recently used first.

    Unlike keys and values, recurrent states cannot be cut at any token, so a sequence can only
    continue from a checkpoint.

    Args:
        most_bytes: maximum size of all states together.

    Attributes:
        n_bytes: size of the stored states in bytes.
    """

    def __init__(self, most_bytes: int) -> None:
        self.n_bytes = 0
        self._most_bytes = most_bytes
        self._kept: dict[tuple[bytes, tuple[int, ...]], _Kept[T]] = {}  # least recently used first
        self._parts: dict[bytes, set[tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, ids: Sequence[int], state: T, n_bytes: int) -> bool:
        """Keep the state after `ids`, evicting others if necessary.

        Returns:
            False if the state is larger than the limit.
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
        """Return the lengths of a sequence's prefixes that have a checkpoint, longest first."""
        found = (
            n_whole * PAGE + len(part)
            for n_whole, before in enumerate([ROOT, *page_keys(ids)])
            for part in self._parts.get(before, ())
            if tuple(ids[n_whole * PAGE :][: len(part)]) == part
        )
        return sorted(found, reverse=True)

    def state(self, ids: Sequence[int]) -> T:
        """Return the state after `ids`, and mark it as recently used.

        Raises:
            KeyError: there is no such state.
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
        kept = self._kept.pop(key, None)
        if kept is None:
            return
        before, part = key
        self.n_bytes -= kept.n_bytes
        self._parts[before].discard(part)
        if not self._parts[before]:
            del self._parts[before]


def _key(ids: Sequence[int]) -> tuple[bytes, tuple[int, ...]]:
    keys = page_keys(ids)
    return (keys[-1] if keys else ROOT), tuple(ids[len(keys) * PAGE :])
