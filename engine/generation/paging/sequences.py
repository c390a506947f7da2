"""Sequences of tokens whose keys and values lie in pages of several groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from engine.generation.paging.pool import OutOfPages, PagePool
from engine.model.forward.attention_window import Sight
from engine.model.forward.pages import GONE, PAGE, ROOT, page_keys

CopyPage = Callable[[int, int, int], None]
"""Function that copies a page on all ranks at once: number of the group, source, target."""


class Group(NamedTuple):
    """Layers that see equally far back, and their pages."""

    pool: PagePool
    sight: Sight = Sight()


class Sequences:
    """The sequences that share the pages of a cache.

    Args:
        groups: the groups; the same pages of each hold other layers' keys and values.
        copy: copies a page, before it returns.
    """

    def __init__(self, groups: Sequence[Group], copy: CopyPage) -> None:
        self.groups = tuple(groups)
        self.copy = copy

    def open(self, ids: Sequence[int], lengths: Iterable[int] | None = None) -> PagedSequence:
        """Return a sequence that begins with as many of `ids` as pages are known to hold.

        Args:
            ids: the tokens that are wanted.
            lengths: the only lengths at which it may go on, such as those of recurrent states that
                were kept; None for any.

        Raises:
            OutOfPages: others use the page that the last tokens would need.
        """
        keys = page_keys(ids)
        match = _Match(self.groups, ids, keys)
        candidates = match.lengths() if lengths is None else sorted(lengths, reverse=True)
        n = next((n for n in candidates if n <= len(ids) and match.covers(n)), 0)
        return PagedSequence(self, list(ids[:n]), keys[: n // PAGE])

    def clear(self) -> None:
        """Make sure that nothing is found any more; sequences in use go on."""
        for group in self.groups:
            group.pool.clear()


class _Match:
    """Beginning of a sequence, as far as the pages of the groups hold it."""

    def __init__(self, groups: Sequence[Group], ids: Sequence[int], keys: Sequence[bytes]) -> None:
        self._groups, self._ids, self._keys = groups, ids, keys
        self._begins = [_run_begins(group.pool, keys) for group in groups]
        self._n_whole = min(
            (_n_from_start(x) for x, g in zip(self._begins, groups, strict=True) if not g.sight.n),
            default=len(keys),
        )

    def lengths(self) -> list[int]:
        """Return the lengths that are worth asking `covers` for, the longest first."""
        start = self._n_whole * PAGE
        before = self._keys[self._n_whole - 1] if self._n_whole else ROOT
        rest = self._ids[start : start + PAGE]
        n_part = min((group.pool.best(before, rest)[1] for group in self._groups), default=0)
        return [start + n_part, *range(start, 0, -PAGE)]

    def covers(self, n: int) -> bool:
        """Return whether each group knows all that the token behind the first n sees."""
        n_whole, n_part = divmod(n, PAGE)
        before = self._keys[n_whole - 1] if n_whole else ROOT
        part = self._ids[n - n_part : n]
        for group, begins in zip(self._groups, self._begins, strict=True):
            first = group.sight.first_seen(n)
            if first < n - n_part and begins[n_whole] > first // PAGE:
                return False
            if n_part and first < n and group.pool.best(before, part)[1] < n_part:
                return False
        return True


def _run_begins(pool: PagePool, keys: Sequence[bytes]) -> list[int]:
    """Return, for each number of pages, where the known ones that lead up to it begin."""
    begins = [0]
    for i, key in enumerate(keys):
        begins.append(i + 1 if pool.whole(key) is None else begins[-1])
    return begins


def _n_from_start(begins: Sequence[int]) -> int:
    """Return how many pages are known without a gap from the first one on."""
    return next((i for i, begin in enumerate(begins) if begin), len(begins)) - 1


class PagedSequence:
    """Tokens of one request, and the pages that hold them.

    Attributes:
        ids: tokens that are in the cache.
        tables: for each group, the page of each `PAGE` tokens, or `GONE`.
    """

    def __init__(self, all_of_them: Sequences, ids: list[int], keys: list[bytes]) -> None:
        self._groups, self._copy = all_of_them.groups, all_of_them.copy
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
        """Make sure that each group has pages for n more tokens.

        Args:
            firsts: for each group, the first position that is to have a page, for tokens that were
                computed elsewhere and of which not all are there; none if all are.

        Raises:
            OutOfPages: others use too many; nothing has changed.
        """
        wanted = -(-(len(self.ids) + n) // PAGE)
        before = [len(table) for table in self.tables]
        try:
            for number, (group, table) in enumerate(zip(self._groups, self.tables, strict=True)):
                first = firsts[number] // PAGE if firsts else 0
                while len(table) < wanted:
                    table.append(GONE if len(table) < first else group.pool.take())
        except OutOfPages:
            for number, length in enumerate(before):
                self._drop_from(number, length)
            raise

    def append(self, ids: Sequence[int]) -> None:
        """Note that tokens were computed, for which `reserve` made room.

        Pages that became whole can be found by others; those that no token will see are released.
        """
        n_whole = len(self._keys)
        self.ids.extend(ids)
        self._keys = page_keys(self.ids, self._keys)
        for number, group in enumerate(self._groups):
            for index in range(n_whole, len(self._keys)):
                self._note(number, index, PAGE)
            self._let_go(number, group.sight.first_seen(len(self.ids)) // PAGE)

    def cut(self, n: int) -> bool:
        """Forget all tokens behind the first n, if the pages before them are still there.

        What others use is not overwritten: a copy of the last page is.

        Returns:
            Whether it was done; False if layers have let go what the next token sees.

        Raises:
            OutOfPages: a copy is needed, but others use all pages; nothing has changed.
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
        """Release all pages; their content can be found until their memory is needed."""
        n_whole, n_part = divmod(len(self.ids), PAGE)
        if n_part:
            for number in range(len(self._groups)):
                self._note(number, n_whole, n_part)
        self._release()

    def _share(self, group: Group, table: list[int]) -> None:
        """Use the whole pages that the next token sees."""
        first = group.sight.first_seen(len(self.ids)) // PAGE
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
        if group.sight.first_seen(len(self.ids)) >= len(self.ids):
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
            group.pool.forget(page)  # nobody else is in the way, so this must not fail
            return
        table[-1] = GONE
        try:
            table[-1] = group.pool.take()
            self._copy(number, page, table[-1])
        finally:
            group.pool.release([page])

    def _before(self, index: int) -> bytes:
        """Return the key of the page before one."""
        return self._keys[index - 1] if index else ROOT

    def _note(self, number: int, index: int, n: int) -> None:
        """Make known what a page holds: n tokens."""
        page = self.tables[number][index]
        if page != GONE:
            ids = self.ids[index * PAGE : index * PAGE + n]
            self._groups[number].pool.note(page, self._before(index), ids)

    def _let_go(self, number: int, first: int) -> None:
        """Release the pages before one, which no token will see."""
        table = self.tables[number]
        gone = [index for index in range(min(first, len(table))) if table[index] != GONE]
        pages = [table[index] for index in reversed(gone)]
        self._groups[number].pool.release(pages, is_passed=True)
        for index in gone:
            table[index] = GONE

    def _sees_all(self, n: int) -> bool:
        """Return whether all is there that the token behind the first n sees."""
        return all(
            page != GONE
            for group, table in zip(self._groups, self.tables, strict=True)
            for page in table[group.sight.first_seen(n) // PAGE : -(-n // PAGE)]
        )

    def _is_only_user(self, number: int, index: int) -> bool:
        """Return whether a page from an index on becomes free when this sequence drops it."""
        pool = self._groups[number].pool
        return any(page != GONE and pool.n_users(page) == 1 for page in self.tables[number][index:])

    def _drop_from(self, number: int, index: int) -> None:
        """Release the pages from an index on, the last ones first."""
        table = self.tables[number]
        self._groups[number].pool.release(reversed([p for p in table[index:] if p != GONE]))
        del table[index:]

    def _release(self) -> None:
        """Release all pages, the last ones first."""
        for number in range(len(self._groups)):
            self._drop_from(number, 0)
