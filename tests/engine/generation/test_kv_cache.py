"""Sequences that share pages see their own tokens, and no page is lost."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.generation.kv_cache import Group, OutOfPages, PagedSequence, PagePool, Sequences
from engine.model.forward.pages import GONE, PAGE, AttentionWindow, page_keys

EMPTY = -7


class Memory:
    """Pages that hold token ids in place of keys and values, and the sequences that use them."""

    def __init__(self, *groups: tuple[int, AttentionWindow]) -> None:
        self.groups = [Group(PagePool(n), window) for n, window in groups]
        self.cells = [[[EMPTY] * PAGE for _ in range(n)] for n, _ in groups]
        self.n_copied = 0
        self.all = Sequences(self.groups, self.copy)

    def copy(self, group: int, source: int, target: int) -> None:
        self.n_copied += 1
        self.cells[group][target] = list(self.cells[group][source])

    def write(self, sequence: PagedSequence, ids: Sequence[int]) -> None:
        """Do what a pass over more tokens does."""
        sequence.reserve(len(ids))
        for cells, table in zip(self.cells, sequence.tables, strict=True):
            for position, token in enumerate(ids, len(sequence.ids)):
                cells[table[position // PAGE]][position % PAGE] = token
        sequence.append(ids)

    def check(self, sequence: PagedSequence) -> None:
        """Check that the next token sees the sequence's own tokens."""
        n = len(sequence.ids)
        for group, cells, table in zip(self.groups, self.cells, sequence.tables, strict=True):
            first = group.window.first_seen(n)
            seen = [cells[table[at // PAGE]][at % PAGE] for at in range(first, n)]
            assert GONE not in table[first // PAGE :] or first >= n
            assert seen == sequence.ids[first:n]

    def check_users(self, sequences: Sequence[PagedSequence]) -> None:
        """Check that each page is counted as often as sequences have it, and none is lost."""
        for number, group in enumerate(self.groups):
            tables = [[p for p in s.tables[number] if p != GONE] for s in sequences]
            counts = [sum(page in table for table in tables) for page in range(group.pool.n_pages)]
            assert [group.pool.n_users(page) for page in range(group.pool.n_pages)] == counts
            assert group.pool.n_free == counts.count(0)


def tokens(n: int, seed: int = 0) -> list[int]:
    return [seed * 10_000 + i for i in range(n)]


WHOLE = AttentionWindow()


@pytest.mark.parametrize(
    ("window", "firsts"),
    [
        (WHOLE, [0, 0, 0, 0, 0, 0, 0]),
        (AttentionWindow(3), [0, 0, 0, 1, 2, 3, 4]),
        (AttentionWindow(3, is_chunked=True), [0, 0, 0, 3, 3, 3, 6]),
    ],
)
def test_a_token_sees_itself_and_those_before(window: AttentionWindow, firsts: list[int]) -> None:
    assert [window.first_seen(position) for position in range(7)] == firsts


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 1500), is_chunked=st.booleans(), n_batch=st.integers(1, 600),
    n_ctx=st.integers(1, 3000),
)  # fmt: skip
def test_as_many_pages_are_used_as_planned(
    n: int, is_chunked: bool, n_batch: int, n_ctx: int
) -> None:
    window = AttentionWindow(n, is_chunked)
    memory = Memory((window.n_pages(n_ctx, n_batch), window))
    sequence = memory.all.open([])
    for start in range(0, n_ctx, n_batch):
        memory.write(sequence, tokens(n_ctx)[start : start + n_batch])
    assert len(sequence.ids) == n_ctx


def test_the_next_turn_goes_on_in_the_pages_of_the_last_one() -> None:
    memory = Memory((8, WHOLE))
    first = memory.all.open(tokens(600))
    assert first.ids == []
    memory.write(first, tokens(600))
    tables = [list(table) for table in first.tables]
    first.close()
    second = memory.all.open(tokens(900))
    assert second.ids == tokens(600)
    assert second.tables == tables
    assert memory.n_copied == 0
    memory.write(second, tokens(900)[600:])
    memory.check(second)


def test_two_at_once_share_whole_pages_and_copy_the_last_one() -> None:
    memory = Memory((8, WHOLE))
    first = memory.all.open([])
    memory.write(first, tokens(600))
    first.close()
    sequences = [memory.all.open([*tokens(550), *tokens(50, n)]) for n in (1, 2)]
    assert [s.ids for s in sequences] == [tokens(550)] * 2
    assert memory.n_copied == 2
    assert sequences[0].tables[0][:2] == sequences[1].tables[0][:2]
    for n, sequence in enumerate(sequences):
        memory.write(sequence, tokens(300, n + 1))
    for sequence in sequences:
        memory.check(sequence)
    memory.check_users(sequences)


def test_a_window_holds_what_is_seen_and_no_more() -> None:
    memory = Memory((400, WHOLE), (4, AttentionWindow(300)))
    sequence = memory.all.open([])
    for start in range(0, 20_000, 100):
        memory.write(sequence, tokens(100, start))
        memory.check(sequence)
    assert sum(page != GONE for page in sequence.tables[1]) <= 3
    assert sum(page != GONE for page in sequence.tables[0]) == -(-20_000 // PAGE)


def test_a_chunk_begins_anew() -> None:
    memory = Memory((3, AttentionWindow(512, is_chunked=True)))
    sequence = memory.all.open([])
    for start in range(0, 512 * 9, 64):
        memory.write(sequence, tokens(64, start))
        memory.check(sequence)
    assert all(page == GONE for page in sequence.tables[0])


def test_a_match_goes_back_to_where_the_window_is_still_held() -> None:
    """The pages of windowed layers in which a conversation was left are known longest."""
    memory = Memory((40, WHOLE), (6, AttentionWindow(256)))
    first = memory.all.open([])
    for start in range(0, 4000, 200):
        memory.write(first, tokens(4000)[start : start + 200])
    first.close()
    assert memory.all.open(tokens(4000)).ids == tokens(4000)
    other = memory.all.open([*tokens(1000), 1])
    assert len(other.ids) < 1000, "its window was let go and overwritten"


def test_the_end_of_an_idle_sequence_goes_first() -> None:
    memory = Memory((6, WHOLE))
    first = memory.all.open([])
    memory.write(first, tokens(4 * PAGE))
    first.close()
    other = memory.all.open(tokens(4 * PAGE, 1))
    memory.write(other, tokens(3 * PAGE, 1))
    assert len(memory.all.open(tokens(4 * PAGE)).ids) == 3 * PAGE


def test_what_a_window_has_left_goes_before_the_windows_of_others() -> None:
    memory = Memory((20, WHOLE), (5, AttentionWindow(PAGE)))
    first = memory.all.open([])
    memory.write(first, tokens(2 * PAGE + 9))
    first.close()
    other = memory.all.open(tokens(9 * PAGE, 1))
    for at in range(9):
        memory.write(other, tokens(9 * PAGE, 1)[at * PAGE : (at + 1) * PAGE])
    assert len(memory.all.open(tokens(3 * PAGE)).ids) == 2 * PAGE + 9


def test_without_pages_nothing_changes() -> None:
    memory = Memory((4, WHOLE), (2, WHOLE))
    sequence = memory.all.open([])
    memory.write(sequence, tokens(2 * PAGE))
    with pytest.raises(OutOfPages):
        sequence.reserve(1)
    assert [len(table) for table in sequence.tables] == [2, 2]
    memory.check_users([sequence])


def test_a_single_sequence_never_waits_for_itself() -> None:
    """With all pages idle and the last one known to hold more than is wanted."""
    memory = Memory((3, WHOLE))
    first = memory.all.open([])
    memory.write(first, tokens(3 * PAGE))
    first.close()
    second = memory.all.open(tokens(3 * PAGE - 10))
    assert len(second.ids) == 3 * PAGE - 10
    memory.write(second, tokens(10, 5))
    memory.check(second)
    memory.check_users([second])


def test_only_given_lengths_are_taken() -> None:
    memory = Memory((8, WHOLE))
    first = memory.all.open([])
    memory.write(first, tokens(700))
    first.close()
    assert len(memory.all.open(tokens(700), [900, 520, 300]).ids) == 520
    assert memory.all.open(tokens(700), []).ids == []


def test_keys_stand_for_all_before() -> None:
    one, other = tokens(3 * PAGE), [9, *tokens(3 * PAGE)[1:]]
    assert not set(page_keys(one)) & set(page_keys(other))
    assert page_keys(one, page_keys(one[: 2 * PAGE])) == page_keys(one)
    assert page_keys(one[: PAGE - 1]) == []


class Interleaved(RuleBasedStateMachine):
    """Sequences that begin alike, come, grow, are cut and go in any order, in few pages."""

    @initialize(
        windows=st.lists(
            st.sampled_from([
                WHOLE, WHOLE, AttentionWindow(100), AttentionWindow(700),
                AttentionWindow(600, is_chunked=True),
            ]),
            min_size=1, max_size=3,
        )
    )  # fmt: skip
    def begin(self, windows: list[AttentionWindow]) -> None:
        self.memory = Memory(*((9, window) for window in windows))
        self.open: list[PagedSequence] = []

    @rule(n=st.integers(0, 1500), seed=st.integers(0, 2), fork=st.integers(0, 1500))
    def come(self, n: int, seed: int, fork: int) -> None:
        wanted = [*tokens(fork), *tokens(n, seed)][:n]
        try:
            self.open.append(self.memory.all.open(wanted))
        except OutOfPages:
            assert self.open, "others must be in the way"
            return
        sequence = self.open[-1]
        assert sequence.ids == wanted[: len(sequence.ids)]
        self.memory.check(sequence)
        self.grow_by(sequence, wanted[len(sequence.ids) :][:400])

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99), n=st.integers(1, 400), seed=st.integers(0, 2))
    def grow(self, which: int, n: int, seed: int) -> None:
        sequence = self.open[which % len(self.open)]
        at = len(sequence.ids)
        self.grow_by(sequence, tokens(at + n, seed)[at:])

    def grow_by(self, sequence: PagedSequence, ids: list[int]) -> None:
        if len(sequence.ids) + len(ids) > 5 * PAGE:
            return
        try:
            self.memory.write(sequence, ids)
        except OutOfPages:
            assert len(self.open) > 1, "a sequence alone has room"

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99), back=st.integers(0, 600))
    def cut(self, which: int, back: int) -> None:
        sequence = self.open[which % len(self.open)]
        n = max(0, len(sequence.ids) - back)
        wanted = sequence.ids[:n]
        try:
            if sequence.cut(n):
                assert sequence.ids == wanted
        except OutOfPages:
            assert len(self.open) > 1

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99))
    def go(self, which: int) -> None:
        self.open.pop(which % len(self.open)).close()

    @rule()
    def fail(self) -> None:
        self.memory.all.clear()

    @invariant()
    def each_sees_its_own(self) -> None:
        for sequence in getattr(self, "open", ()):
            self.memory.check(sequence)
        if hasattr(self, "memory"):
            self.memory.check_users(self.open)


TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
