"""How many pages a model has, and which layers share them."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.generation.kv_cache import Group, PagePool, Sequences
from engine.load_params import LoadParams
from engine.model.forward.operands import Scores
from engine.model.forward.pages import NO_WINDOW, AttentionWindow
from engine.model.forward.state import CacheSize, KVState, RecurrentState, windows_of
from engine.model.sharding.shares import Ranges

WINDOW = AttentionWindow(512)


def state(window: AttentionWindow) -> KVState:
    whole = Ranges(((0, 1),), 1)
    return KVState(whole, whole, 8, 8, window)


@pytest.mark.parametrize(
    ("scores", "window"),
    [
        (Scores(1.0), NO_WINDOW),
        (Scores(1.0, window=512), WINDOW),
        (Scores(1.0, chunk=64), AttentionWindow(64, is_chunked=True)),
        (Scores(1.0, window=8, chunk=64), AttentionWindow(8)),
        (Scores(1.0, window=80, chunk=64), AttentionWindow(64, is_chunked=True)),
    ],
)
def test_what_is_kept_is_all_that_scores_see(scores: Scores, window: AttentionWindow) -> None:
    assert scores.attention_window == window
    assert all(window.first_seen(p) <= scores.first_visible(p) for p in range(300))


def test_groups_have_an_order_of_their_own() -> None:
    chunk, narrow = AttentionWindow(512, is_chunked=True), AttentionWindow(64)
    states = [state(s) for s in (narrow, chunk, WINDOW, NO_WINDOW, narrow, NO_WINDOW)]
    recurrent = RecurrentState(s=(Ranges(((0, 1),), 1), (2, 2)))
    expected = (NO_WINDOW, WINDOW, chunk, narrow)
    assert windows_of([*states, recurrent]) == windows_of(reversed(states)) == expected
    assert windows_of([recurrent]) == ()


@pytest.mark.parametrize(
    ("n_ctx", "parallel", "n_batch", "whole", "windowed"),
    [
        (1, 1, 512, 1, 1),
        (2048, 1, 512, 8, 8),
        (32768, 1, 512, 128, 5 + 2 * 3),
        (32768, 1, 2048, 128, 11 + 2 * 3),
        (32768, 4, 512, 512, 5 + 8 * 3),
        (32768, 8, 512, 1024, 5 + 15 * 3),
        (32768, 16, 512, 2048, 5 + 15 * 3),
        (1000, 4, 512, 16, 16),
    ],
)
def test_a_window_takes_few_pages(
    n_ctx: int, parallel: int, n_batch: int, whole: int, windowed: int
) -> None:
    size = CacheSize(n_ctx, "f16", parallel, n_batch)
    assert (size.n_pages(NO_WINDOW), size.n_pages(WINDOW)) == (whole, windowed)


def test_recurrent_states_have_a_slot_for_each_sequence() -> None:
    assert [CacheSize(256, n_parallel=n).n_slots for n in (1, 2, 3, 16)] == [2, 2, 3, 16]


def test_guesses_have_recurrent_states_of_their_own() -> None:
    """Three if nothing else is known, and no more than a pass has rows."""
    slots = [CacheSize(256, n_parallel=n, n_guessed=3).n_slots for n in (1, 2, 3, 4, 8, 16)]
    assert slots == [4, 8, 12, 16, 16, 16]

    def n_slots(*devices: str, **wished: Any) -> int:
        return CacheSize.asked(LoadParams("m.gguf", devices, **wished), 256).n_slots

    assert [n_slots("cpu", draft_max=n) for n in (1, 2, 3, 15)] == [2, 3, 4, 4]
    assert n_slots("cpu", draft="off") == n_slots("cuda:0", draft="off") == 2
    assert n_slots("cuda:0") == n_slots("cpu", "cuda:0") == 4


@pytest.mark.parametrize("parallel", [0, -1, 17, True, 1.5, None])
def test_other_numbers_of_requests_are_refused(parallel: object) -> None:
    with pytest.raises(EngineError, match="parallel"):
        LoadParams("m.gguf", parallel=parallel)  # type: ignore[arg-type]


def test_a_load_decides_the_sizes(tmp_path: Path) -> None:
    params = LoadParams(str(tmp_path), kv_type="q8_0", parallel=3)
    assert CacheSize.asked(params, 100) == CacheSize(100, "q8_0", 3, 512, 3)
    assert CacheSize.asked(params, 100, 2048).n_batch == 2048


@pytest.mark.parametrize(
    ("size", "windows", "rooms"),
    [
        (CacheSize(100), [NO_WINDOW], [(1, 100)]),
        (CacheSize(1000), [NO_WINDOW], [(1, 1000), (2, 512), (4, 256)]),
        (CacheSize(4096, n_parallel=8), [NO_WINDOW], [(8, 4096), (12, 2560), (16, 2048)]),
        (CacheSize(4096, n_parallel=5), [NO_WINDOW],
         [(5, 4096), (6, 3328), (8, 2560), (12, 1536), (16, 1280)]),
        (CacheSize(256, n_parallel=16), [NO_WINDOW], [(16, 256)]),
        (CacheSize(32768), [NO_WINDOW, WINDOW],
         [(1, 32768), (2, 16384), (3, 10752), (4, 512), (8, 256)]),
        (CacheSize(32768), [WINDOW], [(3, 32768), (4, 512), (8, 256)]),
    ],
)  # fmt: skip
def test_more_requests_have_room_if_they_are_shorter(
    size: CacheSize, windows: list[AttentionWindow], rooms: list[tuple[int, int]]
) -> None:
    assert list(size.rooms(windows, has_states=False)) == rooms


def test_as_many_sequences_run_as_have_recurrent_states() -> None:
    def rooms(size: CacheSize, *windows: AttentionWindow) -> list[tuple[int, int]]:
        return [tuple(room) for room in size.rooms(windows, has_states=True)]

    assert rooms(CacheSize(1024)) == [(2, 1024)]
    assert rooms(CacheSize(1024), NO_WINDOW) == [(1, 1024), (2, 512)]
    assert rooms(CacheSize(1024, n_parallel=3), NO_WINDOW) == [(3, 1024)]


@settings(max_examples=60, deadline=None)
@given(
    n_ctx=st.integers(1, 6000), parallel=st.integers(1, 16), n_batch=st.integers(1, 600),
    windows=st.lists(st.builds(AttentionWindow, st.integers(1, 3000), st.booleans()), max_size=2),
)  # fmt: skip
def test_so_many_requests_never_run_out_of_pages(
    n_ctx: int, parallel: int, n_batch: int, windows: list[AttentionWindow]
) -> None:
    """They grow by turns, one of them a whole batch at a time."""
    size, windows = CacheSize(n_ctx, "f16", parallel, n_batch), [NO_WINDOW, *windows]
    for room in size.rooms(windows, has_states=False):
        groups = [Group(PagePool(size.n_pages(window)), window) for window in windows]
        pages = Sequences(groups, lambda *_: None)
        running = [pages.open([]) for _ in range(room.n)]
        for number, sequence in enumerate(running):
            while len(sequence.ids) < room.n_tokens:
                n = min(n_batch, room.n_tokens - len(sequence.ids))
                sequence.reserve(n)
                sequence.append([number] * n)
        for sequence in running:
            sequence.close()
