"""Boundaries of every part, from the ranks' shares."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import SplitError
from engine.model.forward.cache import head_rows
from engine.model.sharding.placement import Replicate, Shard
from engine.model.sharding.shares import Ranges, apply_overrides, normalise, share_table
from engine.model.sharding.split import BlockDims, cut_model, head_groups, tiles


@st.composite
def models(draw: st.DrawFn) -> tuple[list[float], list[BlockDims], str]:
    split = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any))
    n_kv = draw(st.integers(1, 6))
    dims = BlockDims(n_kv * draw(st.integers(1, 4)), n_kv, n_ff=draw(st.integers(1, 300)))
    mode = draw(st.sampled_from(["tensor", "layer"]))
    return list(map(float, split)), [dims] * draw(st.integers(1, 8)), mode


@given(models())
def test_every_query_head_finds_its_key_value_head_on_its_rank(
    model: tuple[list[float], list[BlockDims], str],
) -> None:
    split, blocks, mode = model
    table = share_table(mode, normalise(split, len(split)), len(blocks), tied=False)
    cut = cut_model(table, blocks, n_vocab=100)
    for block, dims in zip(cut.blocks, blocks, strict=True):
        group = dims.n_head // dims.n_head_kv
        heads = [h for start, stop in block.heads.spans for h in range(start, stop)]
        assert heads == list(range(dims.n_head)), "each query head is computed exactly once"
        for rank, (start, stop) in enumerate(block.heads.spans):
            kv_start, kv_stop = block.kv_heads.spans[rank]
            assert {h // group for h in range(start, stop)} == set(range(kv_start, kv_stop))
            if stop > start:
                rows = head_rows(block.heads, block.kv_heads, rank)
                per_row = (stop - start) // (kv_stop - kv_start)
                rows = [i // per_row for i in range(stop - start)] if rows is None else rows
                assert [kv_start + r for r in rows] == [h // group for h in range(start, stop)]


@given(models())
def test_a_group_holds_exactly_the_ranks_with_a_slice(
    model: tuple[list[float], list[BlockDims], str],
) -> None:
    split, blocks, mode = model
    cut = cut_model(
        share_table(mode, normalise(split, len(split)), len(blocks), tied=True),
        blocks, n_vocab=50, tied=True,
    )  # fmt: skip
    for block in cut.blocks:
        assert block.group == tuple(sorted({*block.heads.owners(), *block.ffn.owners()}))
        assert all(split[r] > 0 for r in block.group)
        assert mode == "tensor" or len(block.group) == 1
    assert cut.embedding == cut.output


def test_a_layer_split_gives_neighbouring_blocks_to_a_rank() -> None:
    table = share_table("layer", normalise([3, 1], 2), 8, tied=False)
    cut = cut_model(table, [BlockDims(4, 2, n_ff=64)] * 8, 10)
    assert [block.group for block in cut.blocks] == [(0,)] * 6 + [(1,)] * 2
    assert cut.embedding.owners() == (0,)
    assert cut.output.owners() == (1,)


def test_with_more_ranks_than_key_value_heads_the_query_heads_still_spread() -> None:
    table = share_table("tensor", normalise(None, 4), 1, tied=False)
    (block,) = cut_model(table, [BlockDims(4, 2, n_ff=64)], 10).blocks
    assert block.heads.spans == ((0, 1), (1, 2), (2, 3), (3, 4))
    assert block.kv_heads.spans == ((0, 1), (0, 1), (1, 2), (1, 2))


def test_an_override_moves_one_part_of_the_matching_blocks() -> None:
    table = share_table("tensor", normalise([1, 1], 2), 3, tied=False)
    names = [f"blk.{i}.{part}.weight" for i in range(3) for part in ("attn_q", "ffn_up_exps")]
    names += ["token_embd.weight", "output.weight"]
    override = [(r"blk\.[12]\.ffn_.*_exps", "cpu"), ("^output", "cpu")]
    table = apply_overrides(table, override, ["cuda:0", "cpu"], names)
    cut = cut_model(table, [BlockDims(4, 2, n_ff_exp=64)] * 3, 10)
    assert [block.experts.owners() for block in cut.blocks] == [(0, 1), (1,), (1,)]
    assert all(block.heads.owners() == (0, 1) for block in cut.blocks)
    assert cut.output.owners() == (1,)
    assert cut.embedding.owners() == (0, 1)


@pytest.mark.parametrize(
    ("split", "n"),
    [([1], 2), ([1, -1], 2), ([0, 0], 2), ([float("nan"), 1], 2), ([float("inf")], 1)],
)
def test_a_split_that_means_nothing_is_refused(split: list[float], n: int) -> None:
    with pytest.raises(SplitError):
        normalise(split, n)


@pytest.mark.parametrize(
    ("pattern", "device", "message"),
    [
        ("(", "cpu", "not a regular expression"),
        ("attn", "cuda:7", "not in use"),
        ("no_such_tensor", "cpu", "matches no tensor"),
        ("attn_norm", "cpu", "matches no tensor"),
    ],
)
def test_an_override_that_can_do_nothing_is_refused(
    pattern: str, device: str, message: str
) -> None:
    table = share_table("tensor", (1.0,), 1, tied=False)
    names = ["blk.0.attn_q.weight", "blk.0.attn_norm.weight"]
    with pytest.raises(SplitError, match=message):
        apply_overrides(table, [(pattern, device)], ["cpu"], names)


def test_huge_weights_are_still_a_ratio() -> None:
    assert normalise([1e308, 1e308], 2) == (0.5, 0.5)


def test_a_placement_names_the_pieces_of_a_rank() -> None:
    shard = Shard(1, Ranges(((0, 1), (1, 1), (1, 3)), 3))
    assert shard.pieces((5, 12), 0) == ((slice(0, 5), slice(0, 4)),)
    assert shard.pieces((5, 12), 1) == ()
    assert shard.pieces((5, 12), 2) == ((slice(0, 5), slice(4, 12)),)
    assert Replicate((1,)).pieces((3,), 1) == ((slice(0, 3),),)
    assert Replicate((1,)).pieces((3,), 0) == ()


def test_a_rank_holds_its_interval_of_each_segment() -> None:
    keys, values = Ranges(((0, 1), (1, 2)), 2), Ranges(((0, 4), (4, 4)), 4)
    shard = Shard(0, (keys, values, keys))
    assert shard.owners() == (0, 1)
    assert [s[0] for s in shard.pieces((16, 3), 0)] == [slice(0, 2), slice(4, 14)]
    assert [s[0] for s in shard.pieces((16, 3), 1)] == [slice(2, 4), slice(14, 16)]


def test_one_rank_holds_all_segments_as_one_piece() -> None:
    keys, values = Ranges(((0, 2), (0, 0)), 2), Ranges(((0, 4), (0, 0)), 4)
    assert Shard(0, (keys, keys, values)).pieces((16,), 0) == ((slice(0, 16),),)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), st.integers(1, 5),
       st.integers(1, 5))  # fmt: skip
def test_state_heads_stored_tiled_are_the_same_heads(
    split: list[int], n_group: int, size: int
) -> None:
    """Tile j of a file has head g × size + j of every group g."""
    dims = BlockDims(n_state_head=n_group * size, n_state_group=n_group)
    shares = normalise([float(s) for s in split], len(split))
    (block,) = cut_model(share_table("tensor", shares, 1, tied=False), [dims], 10).blocks
    found = tiles(block.state_heads, n_group)
    for rank, (start, stop) in enumerate(block.state_heads.spans):
        heads = [g * size + j for j, tile in enumerate(found) for g in range(*tile.spans[rank])]
        assert sorted(heads) == list(range(start, stop))
        groups = head_groups(block.state_heads, block.state_groups, rank)
        first = block.state_groups.spans[rank][0]
        assert [first + g for g in groups] == [h // size for h in range(start, stop)]


def test_channels_are_cut_at_multiples_of_their_unit() -> None:
    dims = BlockDims(n_state_head=80, n_state_group=80, state_unit=32)
    table = share_table("tensor", normalise([1, 1], 2), 1, tied=False)
    (block,) = cut_model(table, [dims], 10).blocks
    assert block.state_heads.spans == ((0, 64), (64, 80))


def test_a_block_that_reads_anothers_keys_is_cut_like_it() -> None:
    """Even where an override has moved it, and where rounding would differ."""
    first, second = BlockDims(6, 3), BlockDims(6, 3, kv_of=0)
    table = share_table("tensor", normalise([1, 1], 2), 2, tied=False)
    table = apply_overrides(table, [(r"blk\.0", "b")], ["a", "b"], ["blk.0.attn_q.weight"])
    cut = cut_model(table, [first, second], 10)
    assert cut.blocks[1].kv_heads == cut.blocks[0].kv_heads
    assert cut.blocks[1].heads.owners() == (1,)


def test_heads_held_twice_count_once() -> None:
    """Of what several ranks hold, `first_held` gives each unit to one of them."""
    ranges = Ranges(((0, 2), (1, 2), (1, 3), (0, 0)), 3)
    assert [ranges.first_held(rank) for rank in range(4)] == [
        slice(0, 2), slice(1, 1), slice(1, 2), slice(0, 0),
    ]  # fmt: skip
