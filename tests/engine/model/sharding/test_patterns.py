"""Share tables that split modes, blocks on the CPU and overrides lead to."""

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import LoadParams, SplitError
from engine.load_params import default_groups
from engine.model.sharding.placement import RequestedShares, requested_shares
from engine.model.sharding.shares import Shares

PARTS = ("attention", "recurrent", "ffn", "experts", "shared")
STEMS = {
    "attention": ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "attn_kv_a_mqa",
                  "attn_k_b", "attn_gate", "attn_sinks"),
    "recurrent": ("ssm_in", "ssm_a", "ssm_conv1d", "ssm_out", "shortconv.in_proj"),
    "ffn": ("ffn_gate", "ffn_up", "ffn_down"),
    "experts": ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps"),
    "shared": ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
}  # fmt: skip
"""Names that files have, by the part that they belong to."""

REPLICATED = ("attn_norm", "attn_q_norm", "ffn_norm", "ffn_gate_inp", "exp_probs_b", "ssm_norm")


def names(n_layer: int, *, tied: bool = False) -> list[str]:
    """Return the tensor names of a model whose blocks have every part."""
    stems = [stem for part in STEMS.values() for stem in part] + list(REPLICATED)
    ends = ["token_embd.weight", "output_norm.weight"] + ([] if tied else ["output.weight"])
    return [f"blk.{i}.{stem}.weight" for i in range(n_layer) for stem in stems] + ends


def wanted(n_layer: int, *, tied: bool = False, **options: object) -> RequestedShares:
    params = LoadParams("m.gguf", **options)  # type: ignore[arg-type]
    return requested_shares(params, n_layer, tied=tied, tensors=names(n_layer, tied=tied))


def test_groups_get_whole_blocks_and_cut_them_inside() -> None:
    found = wanted(8, devices=("cpu",) * 4, split=(3, 1, 2, 2), split_mode="groups", groups=(2, 2))
    first, second = (0.75, 0.25, 0.0, 0.0), (0.0, 0.0, 0.5, 0.5)
    rows = [block.attention for block in found.table.blocks]
    assert rows == [first] * 4 + [second] * 4
    assert all(getattr(b, part) == b.attention for b in found.table.blocks for part in PARTS)
    assert (found.table.embedding, found.table.output) == (first, second)


def test_tied_ends_lie_with_the_last_group() -> None:
    options = {"devices": ("cpu",) * 3, "split_mode": "groups", "groups": (1, 2)}
    table = wanted(6, tied=True, **options).table
    assert table.embedding == table.output == (0.0, 0.5, 0.5)


@pytest.mark.parametrize("tied", [False, True])
def test_groups_of_one_are_layers_and_one_group_is_a_tensor_split(tied: bool) -> None:
    common = {"tied": tied, "devices": ("cpu",) * 3, "split": (5, 2, 1)}
    layer, tensor = (wanted(7, split_mode=mode, **common).table for mode in ("layer", "tensor"))
    assert wanted(7, split_mode="groups", groups=(1, 1, 1), **common).table == layer
    assert wanted(7, split_mode="groups", groups=(3,), **common).table == tensor


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data(), st.integers(1, 90),
    st.booleans(),
)  # fmt: skip
def test_every_group_gets_its_blocks_in_a_row(
    groups: list[int], data: st.DataObject, n_layer: int, tied: bool
) -> None:
    n_ranks = sum(groups)
    split = data.draw(st.lists(st.integers(0, 9), min_size=n_ranks, max_size=n_ranks).filter(any))
    table = wanted(
        n_layer, tied=tied, devices=("cpu",) * n_ranks, split=tuple(split), split_mode="groups",
        groups=tuple(groups),
    ).table  # fmt: skip
    rows = [block.ffn for block in table.blocks]
    begin = 0
    for size in groups:
        inside = range(begin, begin + size)
        total = sum(split[r] for r in inside)
        mine = [row for row in rows if any(row[r] for r in inside)]
        assert abs(len(mine) - n_layer * total / sum(split)) < 1 + 1e-9
        for row in mine:
            assert row == pytest.approx(
                [split[r] / total if r in inside else 0 for r in range(n_ranks)]
            )
        begin += size
    starts = [next(r for r, share in enumerate(row) if share) for row in rows]
    assert all(a <= b for a, b in pairwise(starts))
    assert table.output == rows[-1]
    assert table.embedding == rows[-1 if tied else 0]


@pytest.mark.parametrize(
    ("devices", "groups"),
    [
        (("cuda:0", "cuda:1", "cpu"), (2, 1)),
        (("cpu", "cuda:0", "cuda:1", "cuda:2"), (1, 3)),
        (("cuda:0",) * 4, (2, 2)),
        (("cuda:0", "cuda:1", "cuda:2"), (2, 1)),
        (("cpu",), (1,)),
    ],
)
def test_groups_that_nobody_asked_for_are_devices_of_a_kind_or_pairs(
    devices: tuple[str, ...], groups: tuple[int, ...]
) -> None:
    assert default_groups(devices) == groups
    assert LoadParams("m.gguf", devices, split_mode="groups").group_sizes == groups
    assert LoadParams("m.gguf", devices).group_sizes == ()
    chosen = wanted(4, devices=devices, split_mode="groups").table
    assert chosen == wanted(4, devices=devices, split_mode="groups", groups=groups).table


@pytest.mark.parametrize("groups", [(2, 2), (1,), ()])
def test_groups_of_another_number_of_ranks_are_refused(groups: tuple[int, ...]) -> None:
    with pytest.raises(SplitError, match="but there are 3 devices"):
        wanted(4, devices=("cpu",) * 3, split_mode="groups", groups=groups)
    wanted(4, devices=("cpu",) * 3, split_mode="layer", groups=groups)


def hot(rank: int, n_ranks: int = 3) -> Shares:
    return tuple(float(r == rank) for r in range(n_ranks))


def test_the_first_blocks_go_to_a_cpu_that_nobody_asked_for() -> None:
    found = wanted(
        9, devices=("cuda:0", "cuda:1"), split=(2, 1), split_mode="layer", n_cpu_blocks=3
    )
    assert found.devices == ("cuda:0", "cuda:1", "cpu")
    assert found.shares == (pytest.approx(2 / 3), pytest.approx(1 / 3), 0.0)
    owners = [block.ffn.index(1.0) for block in found.table.blocks]
    assert owners == [2] * 3 + [0] * 4 + [1] * 2, "the others are split as if there were no more"
    assert found.table.embedding == hot(2)
    assert found.table.output == hot(1)


def test_a_cpu_among_the_devices_takes_what_goes_to_the_cpu() -> None:
    found = wanted(4, devices=("cuda:0", "cpu"), split=(3, 1), n_cpu_blocks=1, tied=True)
    assert found.devices == ("cuda:0", "cpu")
    assert [block.ffn for block in found.table.blocks] == [hot(1, 2)] + [(0.75, 0.25)] * 3
    assert found.table.embedding == (0.75, 0.25), "it is the output head, too"


@pytest.mark.parametrize("mode", ["tensor", "layer", "groups"])
def test_all_blocks_on_the_cpu_leave_the_output_head(mode: str) -> None:
    found = wanted(4, devices=("cuda:0", "cuda:1"), split_mode=mode, n_cpu_blocks=99)
    assert {block.attention for block in found.table.blocks} == {hot(2)}
    assert len(found.table.blocks) == 4
    assert sum(found.table.output[:2]) == 1


def test_the_experts_of_the_first_blocks_go_to_the_cpu() -> None:
    found = wanted(3, devices=("cuda:0", "cuda:1"), n_cpu_moe=2)
    assert found.devices[2] == "cpu"
    assert [block.experts for block in found.table.blocks] == [hot(2), hot(2), (0.5, 0.5, 0.0)]
    for part in ("attention", "recurrent", "ffn", "shared"):
        assert {getattr(block, part) for block in found.table.blocks} == {(0.5, 0.5, 0.0)}


def test_a_model_without_experts_cannot_put_them_anywhere() -> None:
    params = LoadParams("m.gguf", n_cpu_moe=1)
    with pytest.raises(SplitError, match="no experts"):
        requested_shares(params, 1, tied=False, tensors=["blk.0.ffn_up.weight"])


@pytest.mark.parametrize("part", PARTS)
def test_every_part_can_be_named_by_each_of_its_tensors(part: str) -> None:
    before = wanted(2, devices=("cpu",) * 2).table
    for stem in STEMS[part]:
        pattern = rf"blk\.1\.{stem}\.weight"
        table = wanted(2, devices=("cpu",) * 2, overrides=((pattern, "#1"),)).table
        assert table.blocks[0] == before.blocks[0]
        moved = [p for p in PARTS if getattr(table.blocks[1], p) == hot(1, 2)]
        assert moved == [part]
        assert (table.embedding, table.output) == (before.embedding, before.output)


@pytest.mark.parametrize(("name", "end"), [("token_embd", "embedding"), ("^output\\.", "output")])
def test_the_ends_can_be_named(name: str, end: str) -> None:
    before = wanted(2, devices=("cpu",) * 2).table
    table = wanted(2, devices=("cpu",) * 2, overrides=((name, "#1"),)).table
    assert getattr(table, end) == hot(1, 2)
    assert table.blocks == before.blocks
    assert table != before


def test_the_attention_of_a_recurrent_block_is_its_recurrent_layer() -> None:
    params = LoadParams("m.gguf", ("cpu",) * 2, overrides=((r"blk\.1\.attn_qkv", "#0"),))
    table = requested_shares(
        params, 2, tied=False, tensors=names(2), recurrent=(False, True)
    ).table  # fmt: skip
    assert table.blocks[1].recurrent == hot(0, 2)
    assert table.blocks[1].attention == (0.5, 0.5)


def test_overrides_win_over_what_goes_to_the_cpu_and_later_ones_over_earlier() -> None:
    overrides = ((r"blk\.0\.", "#0"), (r"blk\.0\.ffn", "cuda:1"), ("attn", "cpu"))
    devices = ("cuda:0", "cuda:1", "cpu")
    found = wanted(2, devices=devices, split=(1, 1, 0), n_cpu_blocks=1, overrides=overrides)
    block = found.table.blocks[0]
    assert (block.recurrent, block.ffn, block.attention) == (hot(0), hot(1), hot(2))


@pytest.mark.parametrize("target", ["#2", "#-1", "#", "#x", "#1.0", "#١"])
def test_a_rank_that_there_is_not_is_refused(target: str) -> None:
    with pytest.raises(SplitError, match="names a rank that does not exist"):
        wanted(2, devices=("cpu",) * 2, overrides=(("ffn", target),))


def test_a_table_follows_a_mouse() -> None:
    """80 blocks, each pinned by an override; the bound is loose because machines are noisy."""
    tensors = dict.fromkeys(names(80))
    overrides = tuple((rf"blk\.{i}\.ffn_.*_exps", "#1") for i in range(80))
    params = [
        LoadParams(
            "m.gguf", ("cuda:0",) * 4, (n, 2, 3, 4), "groups", overrides=overrides, n_cpu_moe=30
        )
        for n in range(1, 12)
    ]
    seconds = []
    for each in params:
        start = time.perf_counter()
        requested_shares(each, 80, tied=False, tensors=tensors.keys(), recurrent=(False,) * 80)
        seconds.append(time.perf_counter() - start)
    assert min(seconds[1:]) < 0.004
