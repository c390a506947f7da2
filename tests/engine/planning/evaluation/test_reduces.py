"""Blocks state how many all-reduces they make; here these are counted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import LoadParams, load_model
from engine.model.layers.mixers.mamba import Mamba2
from engine.model.layers.module import Module
from engine.planning.planner import Planner
from tests.helpers.golden import golden_models, golden_path
from tests.helpers.passes import forward_alone
from tests.helpers.tiny_gguf import tiny_gguf


def modules(module: Module) -> Iterator[Module]:
    yield module
    for _, child in module.children():
        yield from modules(child)


def assert_meets_as_stated(path: Path) -> None:
    """Check the all-reduces of each block over two ranks against the predicted workload's."""
    counts: dict[int, int] = {}
    with load_model(path, ["cpu"] * 2, n_ctx=16) as model:
        rank = model.runtime.ranks[0]
        comm, current = rank.context._comm, [-1]

        def counted(*args: Any) -> Any:
            counts[current[0]] = counts.get(current[0], 0) + 1
            return type(comm).all_reduce(comm, *args)

        comm.all_reduce = counted  # type: ignore[method-assign]
        for layer, block in enumerate(rank.model.blk):

            def forward(x: Any, ctx: Any, block: Any = block, layer: int = layer) -> Any:
                current[0] = layer
                try:
                    return type(block).forward(block, x, ctx)
                finally:
                    current[0] = -1

            block.forward = forward  # type: ignore[method-assign]
        forward_alone(model.runtime.runner, [3, 4, 5], 0)
        for layer, block in enumerate(rank.model.blk):
            is_cut_inside = any(
                isinstance(m, Mamba2) and not m.groups.are_whole for m in modules(block)
            )
            assert counts.get(layer, 0) == sum(block.reduces()) + is_cut_inside
        stated = sum(sum(block.reduces()) for block in rank.model.blk if block.split.group)
    load = Planner(path).evaluate(LoadParams(str(path), ("cpu",) * 2, n_ctx=16)).load
    assert sum(block.count * block.n_reduce for block in load.blocks) == stated


@pytest.mark.parametrize("arch", ["llama", "bitnet"])
def test_blocks_meet_as_often_as_they_say(tmp_path: Path, arch: str) -> None:
    assert_meets_as_stated(tiny_gguf(tmp_path / "m.gguf", arch=arch, n_layer=3))


ARCHITECTURES = {arch: name for name, arch in reversed(golden_models().items())}
"""A golden model of each architecture."""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_blocks_of_each_architecture_meet_as_often_as_they_say(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_BACKEND", "reference")  # no kernels to compile
    assert_meets_as_stated(golden_path(f"{ARCHITECTURES[arch]}.gguf"))
