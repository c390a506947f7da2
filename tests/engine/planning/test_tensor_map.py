"""The map of a model tells how much of each tensor each rank holds."""

import statistics
import time
from pathlib import Path

import pytest

from engine import LoadParams, Planner, SplitError
from engine.formats.gguf.reader import GGUFFile
from engine.model.architectures.declare import declare
from engine.planning.footprint import packed_bytes, slot_pieces
from engine.planning.planner import PlacementMap, TensorPlace
from tests.helpers.hollow import hollow_moe
from tests.helpers.tiny_gguf import tiny_gguf

GPUS = ("cuda:0", "cuda:1", "cuda:2", "cuda:3")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of four blocks of experts, without weights."""
    path = tmp_path_factory.mktemp("moe") / "m.gguf"
    return hollow_moe(path, n_layer=4, n_embd=512, n_head=16, n_vocab=512)


def placed(path: Path, **params: object) -> PlacementMap:
    return Planner(path).placement(LoadParams(str(path), **params))  # type: ignore[arg-type]


def tensor(found: PlacementMap, name: str) -> TensorPlace:
    return next(place for place in found.tensors if place.name == name)


def test_ranks_hold_what_the_loader_would_read(tmp_path: Path) -> None:
    """Each tensor lies as declared; matrices are cut once, norms are held by all."""
    path = tiny_gguf(tmp_path / "m.gguf", n_layer=2, n_head=8, n_head_kv=4, n_ff=300, quant="Q8_0")
    params = LoadParams(str(path), ("cpu", "cpu"), (3.0, 1.0))
    found = Planner(path).placement(params)
    slots = declare(GGUFFile.open(path), params).slots
    assert [place.name for place in found.tensors] == [slot.tensor.name for slot in slots]
    for place, slot in zip(found.tensors, slots, strict=True):
        for rank, n_bytes in enumerate(place.ranks):
            pieces = slot_pieces(slot, rank)
            assert n_bytes == sum(packed_bytes(slot, piece) for piece in pieces), place.name
    gate = tensor(found, "blk.1.ffn_gate.weight")
    assert sum(gate.ranks) == gate.n_bytes, "rows are cut, so no block is read twice"
    assert gate.ranks[0] > 2 * gate.ranks[1] > 0
    norm = tensor(found, "blk.1.ffn_norm.weight")
    assert norm.ranks == (norm.n_bytes, norm.n_bytes)


def test_a_tensor_knows_its_block_and_the_part_that_moves_with_it(moe: Path) -> None:
    found = placed(moe)
    assert found.n_layer == 4
    experts = tensor(found, "blk.2.ffn_down_exps.weight")
    assert (experts.block, experts.stem, experts.part) == (2, "ffn_down_exps.weight", "experts")
    assert tensor(found, "blk.0.attn_k.weight").part == "attention"
    assert tensor(found, "blk.0.attn_k_norm.weight").part == "", "each rank has its norms"
    embedding = tensor(found, "token_embd.weight")
    assert (embedding.block, embedding.part) == (None, "embedding")
    assert tensor(found, "output.weight").part == "output"
    assert tensor(found, "output_norm.weight").part == ""


def test_what_is_pinned_lies_whole_on_one_rank(moe: Path) -> None:
    """The device may have no share of anything else."""
    pins = ((r"^blk\.1\.ffn_.*_exps\.", "cpu"), (r"^blk\.2\.attn_", "#1"))
    found = placed(moe, devices=GPUS[:2], overrides=pins)
    assert found.devices == ("cuda:0", "cuda:1", "cpu")
    experts = tensor(found, "blk.1.ffn_up_exps.weight")
    assert experts.ranks == (0, 0, experts.n_bytes)
    keys = tensor(found, "blk.2.attn_k.weight")
    assert keys.ranks == (0, keys.n_bytes, 0)
    assert tensor(found, "blk.0.attn_k.weight").ranks[2] == 0


def test_a_layer_split_gives_whole_blocks(moe: Path) -> None:
    found = placed(moe, devices=GPUS[:2], split_mode="layer")
    for place in found.tensors:
        if place.block is not None:
            assert [bool(n) for n in place.ranks] == [place.block < 2, place.block >= 2]


def test_what_cannot_be_split_is_refused(moe: Path) -> None:
    with pytest.raises(SplitError, match="matches no tensor"):
        placed(moe, overrides=(("nothing_like_it", "cpu"),))


def test_a_large_model_is_mapped_in_an_instant(tmp_path: Path) -> None:
    """80 blocks with experts on four devices; time spent on anything else does not count."""
    path = hollow_moe(tmp_path / "large.gguf")
    planner, seconds = Planner(path), []
    for step in range(5):
        params = LoadParams(str(path), GPUS, (0.1, 0.2 + step / 50, 0.5 - step / 50, 0.2))
        start = time.thread_time()
        found = planner.placement(params)
        seconds.append(time.thread_time() - start)
    assert len(found.tensors) == 80 * 12 + 3
    assert statistics.median(seconds) < 0.1
