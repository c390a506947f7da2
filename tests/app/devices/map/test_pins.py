"""Pins are overrides that are written and recognised again, and move exactly their parts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.devices.map.grid import Part, is_pinned, parts_of, pins_of, with_pins
from engine import LoadParams, Planner
from tests.helpers.golden import golden_path
from tests.helpers.hollow import hollow_moe
from tests.helpers.tiny_gguf import tiny_gguf

PARTS = st.one_of(
    st.tuples(
        st.integers(0, 99), st.sampled_from(["attention", "recurrent", "ffn", "experts", "shared"])
    ),
    st.tuples(st.none(), st.sampled_from(["embedding", "output"])),
)
TARGETS = st.sampled_from(["cpu", "cuda:0", "#1"])


@given(pins=st.dictionaries(PARTS, TARGETS, max_size=12))
def test_what_is_written_is_read_back(pins: dict[Part, str]) -> None:
    overrides: tuple[tuple[str, str], ...] = ()
    for part, target in pins.items():
        overrides = with_pins(overrides, [part], target)
    assert pins_of(overrides) == pins
    assert with_pins(overrides, pins, None) == ()


def test_blocks_with_the_same_target_share_a_pattern() -> None:
    overrides = with_pins((), [(n, "experts") for n in (11, 2, 3)], "cpu")
    assert overrides == ((r"^blk\.(2|3|11)\.ffn_.*_exps\.", "cpu"),)
    moved = with_pins(overrides, [(3, "experts")], "cuda:1")
    assert pins_of(moved) == {
        (2, "experts"): "cpu", (11, "experts"): "cpu", (3, "experts"): "cuda:1",
    }  # fmt: skip


def test_what_a_person_typed_stays_and_pins_win() -> None:
    """Later overrides win, so pins come last."""
    typed = (("_exps", "cpu"),)
    overrides = with_pins(typed, [(0, "experts")], "cuda:0")
    assert overrides == (("_exps", "cpu"), (r"^blk\.0\.ffn_.*_exps\.", "cuda:0"))
    assert with_pins(overrides, [(0, "experts")], None) == typed
    assert is_pinned("blk.5.ffn_up_exps.weight", (5, "experts"), overrides)
    assert not is_pinned("blk.5.attn_q.weight", (5, "attention"), overrides)


@pytest.mark.parametrize(
    "pattern", ["_exps", r"^blk\.1\.", r"^blk\.x\.attn_", r"^blk\.(1|)\.attn_", r"blk\.1\.attn_"]
)
def test_other_patterns_are_no_pins(pattern: str) -> None:
    assert parts_of(pattern) == ()


@pytest.mark.parametrize("model", ["dense", "moe", "qwen35moe-q4_k_m", "falcon-h1-q4_k_m"])
def test_the_engine_moves_exactly_the_part(tmp_path: Path, model: str) -> None:
    """All tensors of a pinned part, and no others, lie on the target alone, in each block."""
    if model == "dense":
        path = tiny_gguf(tmp_path / "m.gguf", n_layer=2)
    elif model == "moe":
        path = hollow_moe(tmp_path / "m.gguf", n_layer=2, n_embd=512, n_head=16, n_vocab=512)
    else:
        path = golden_path(f"{model}.gguf")
    planner = Planner(path)
    before = planner.placement(LoadParams(str(path), ("cpu", "cpu")))
    parts = {(t.block, t.part) for t in before.tensors if t.part}
    assert parts
    for part in parts:
        params = LoadParams(str(path), ("cpu", "cpu"), overrides=with_pins((), [part], "cuda:0"))
        for tensor in planner.placement(params).tensors:
            is_moved = (tensor.block, tensor.part) == part
            if tensor.part:
                assert (tensor.ranks[:2] == (0, 0)) is is_moved, (part, tensor.name)
                assert (tensor.ranks[2] == tensor.n_bytes) is is_moved, (part, tensor.name)
