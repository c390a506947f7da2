"""Tests of values that devices of other kinds may round differently."""

import pytest
import torch
from torch import Tensor

from engine.model.forward.batch import Batch
from engine.model.forward.cache import Cache
from engine.model.forward.context import Context
from engine.model.forward.ops import Ops
from engine.model.forward.state import CacheSize

CPU = torch.device("cpu")
GPUS = ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3060")


class Comm:
    """Communicator that returns zeros.

    Attributes:
        sent: shapes of the tensors that were broadcast.
    """

    rank = 0
    waited_s = 0.0

    def __init__(self) -> None:
        self.sent: list[tuple[int, ...]] = []

    def broadcast(
        self, x: Tensor | None, source: int, group: tuple[int, ...], shape: tuple[int, ...]
    ) -> Tensor:
        self.sent.append(tuple(shape))
        return torch.zeros(*shape)


def context(comm: Comm, kinds: tuple[str, ...]) -> Context:
    ctx = Context(comm, Ops(), Cache((), 0, CacheSize(8, "f32"), CPU), CPU, kinds)  # type: ignore[arg-type]
    ctx.begin(Batch.of_one(0, 2, 0))
    assert ctx.join(tuple(range(len(kinds))))
    return ctx


@pytest.mark.parametrize("kinds", [(GPUS[0], GPUS[0]), GPUS, (GPUS[0], "cpu")])
def test_a_choice_is_taken_over_only_from_other_kinds(kinds: tuple[str, ...]) -> None:
    comm, x = Comm(), torch.ones(2, 3)
    found = context(comm, kinds).agree(x, (0, 1))
    is_mixed = len(set(kinds)) > 1
    assert comm.sent == ([(2, 3)] if is_mixed else [])
    assert torch.equal(found, torch.zeros(2, 3) if is_mixed else x)


@pytest.mark.parametrize(("kinds", "is_shown"), [((GPUS[0], GPUS[0]), True), (GPUS, False)])
def test_hidden_states_are_compared_only_between_devices_of_one_kind(
    kinds: tuple[str, ...], is_shown: bool
) -> None:
    """Check `head_input`: devices of different kinds round differently, which is no error."""
    ctx = context(Comm(), kinds)
    ctx.is_sliced = True
    logits, hidden = torch.ones(2, 4), torch.ones(2, 3)
    assert ctx.gather(logits, hidden) is logits
    assert (ctx.head_input is hidden) == is_shown
