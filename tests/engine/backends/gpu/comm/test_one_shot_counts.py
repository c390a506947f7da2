"""Number of one-shot all-reduces of a token: as many as the blocks need, all inside kernels.

A meeting of hosts would split the graph of a captured token.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine import LoadParams
from engine.backends.gpu.kernels import one_shot
from engine.backends.gpu.launch.configs import KernelTarget
from engine.backends.gpu.loading.dry_run import LoneRank, collect_launches
from engine.formats.gguf.reader import GGUFFile
from engine.model.architectures.declare import declare
from tests.helpers.golden import golden_models, golden_path
from tests.helpers.tiny_gguf import tiny_gguf

CARD = KernelTarget("nvidia", 86, 82)
GPUS = ("cuda:0", "cuda:1")


def met(path: Path, monkeypatch: pytest.MonkeyPatch, mode: str = "tensor") -> tuple[int, int, int]:
    """Return a token's expected all-reduces, its one-shot ones, and the hosts' meetings."""
    n_by_host = 0
    by_one_shot, broadcast = LoneRank._by_one_shot, LoneRank.broadcast

    def counted(self: LoneRank, x: object, group: Sequence[int], shape: object) -> object:
        nonlocal n_by_host
        found = by_one_shot(self, x, group, shape)  # type: ignore[arg-type]
        n_by_host += found is None and len(group) > 1
        return found

    def sent(self: LoneRank, x: object, source: int, group: object, shape: object = None) -> object:
        nonlocal n_by_host
        n_by_host += shape is None
        return broadcast(self, x, source, group, shape)  # type: ignore[arg-type]

    monkeypatch.setattr(LoneRank, "_by_one_shot", counted)
    monkeypatch.setattr(LoneRank, "broadcast", sent)
    params = LoadParams(str(path), n_ctx=16, devices=GPUS, split_mode=mode)
    with GGUFFile.open(path) as file:
        declaration = declare(file, params)
        starts = collect_launches(declaration, 0, params, CARD, (1,))
        blocks = [block for block in declaration.model.blk if block.split.group]
    kernels = (one_shot.add_norm, one_shot.all_reduce)
    n_inside = sum(start.kernel in kernels for start in starts)
    return sum(sum(block.reduces()) for block in blocks), n_inside, n_by_host


@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_a_token_needs_no_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", n_layer=2)
    n_stated, n_inside, n_by_host = met(path, monkeypatch, mode)
    assert n_by_host == 0
    assert n_inside == (n_stated + 1 if mode == "tensor" else 1), "the embedding, or the boundary"


@pytest.mark.parametrize("name", sorted(golden_models()) or ["none"])
def test_no_architecture_needs_a_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n_stated, n_inside, n_by_host = met(golden_path(f"{name}.gguf"), monkeypatch)
    assert n_by_host == 0
    assert n_inside >= n_stated
