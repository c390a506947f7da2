"""Tests of additions to the residual stream, and of norms that are computed with them."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine import load_model
from engine.backends.cpu.thread_comm import ThreadCommunicator, ThreadGroup
from engine.model.forward.context import Context
from engine.model.forward.operands import Addend
from engine.model.forward.ops import REFERENCE, Ops
from engine.model.layers.norm import LayerNorm, Norm, RMSNorm
from engine.model.sharding.placement import Replicate
from tests.helpers.tiny_gguf import tiny_gguf


@pytest.fixture
def ctx() -> Context:
    comm = ThreadCommunicator(ThreadGroup(), 0, torch.device("cpu"))
    ctx = Context(comm, REFERENCE, cast(Any, None), torch.device("cpu"), ["cpu"])
    ctx.join((0,))
    return ctx


def norm_of(kind: type[Norm], n: int = 8) -> Norm:
    norm = kind(n, 1e-5, Replicate((0,)))
    norm.weight = torch.rand(n)
    return norm


def test_everything_at_once(ctx: Context) -> None:
    x, delta, bias, inner = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), norm_of(LayerNorm)
    total = ctx.all_reduce_add(x, Addend(delta, bias, inner, 0.5))
    assert torch.equal(total, x + inner(delta + bias, ctx) * 0.5)


def test_a_norm_is_ready_once_and_only_for_the_sum(ctx: Context) -> None:
    norm, other = norm_of(RMSNorm), norm_of(RMSNorm)
    total = ctx.all_reduce_add(torch.randn(3, 8), Addend(torch.randn(3, 8)), norm)
    assert ctx.normed(total, other) is None
    assert ctx.normed(total.clone(), norm) is None
    ready = ctx.normed(total, norm)
    assert ready is not None
    assert torch.equal(ready, norm(total, ctx))
    assert ctx.normed(total, norm) is None


def test_a_sum_is_not_reduced_again(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(ctx._comm, "all_reduce", refuse)
    x, delta = torch.randn(3, 8), torch.randn(3, 8)
    assert torch.equal(ctx.all_reduce_add(x, Addend(delta, is_whole=True)), x + delta)


def test_a_one_shot_adds_up(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that with a one-shot all-reduce no other one is called."""

    class OneShot:
        def all_reduce(self, x: Tensor | None, shape: tuple[int, ...]) -> Tensor:
            return torch.full(shape, 7.0) if x is None else 3 * x

    def refuse(*_: object) -> Tensor:
        raise AssertionError

    sizes: list[int] = []

    def one_shot(group: tuple[int, ...], n: int) -> OneShot:
        sizes.append(n)
        return OneShot()

    monkeypatch.setattr(ctx._comm, "all_reduce", refuse)
    monkeypatch.setattr(ctx._comm, "one_shot", one_shot)
    x, delta = torch.randn(3, 8), torch.randn(3, 8)
    assert torch.equal(ctx.all_reduce_add(x, Addend(delta)), x + 3 * delta)
    assert torch.equal(ctx.all_reduce_add(x, Addend(None)), x + 7)
    assert torch.equal(ctx.all_reduce_add(x, Addend(delta, is_whole=True)), x + delta)
    assert sizes == [24, 24]


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[Norm | None]:
    """Return a list that gets the norm passed to each `add_norm`."""
    seen: list[Norm | None] = []
    compute = Ops.add_norm

    def add_norm(
        self: Ops, x: Tensor, addend: Addend, norm: Norm | None, one_shot: None
    ) -> tuple[Tensor, Tensor | None]:
        seen.append(norm)
        return compute(self, x, addend, norm, one_shot)

    monkeypatch.setattr(Ops, "add_norm", add_norm)
    return seen


def test_blocks_know_what_reads_the_stream_next(tmp_path: Path, readers: list[Norm | None]) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", n_layer=3)
    for split, known in (("tensor", 5), ("layer", 4)):
        with load_model(str(path), devices=["cpu", "cpu"], split=[2, 1], split_mode=split) as model:
            readers.clear()
            model.logits([1, 2, 3])
            n_rank = 2 if split == "tensor" else 1
            assert len(readers) == 6 * n_rank
            assert sum(norm is not None for norm in readers) == known * n_rank
