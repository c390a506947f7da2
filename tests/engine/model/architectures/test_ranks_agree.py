"""All ranks compute from the same bits, and the right logits: several ranks on the CPU.

Every rank of a group adds up the partial sums of all. If one of them ended with another bit, its
part of the next layer, and in the end its slice of the logits, would belong to another hidden
state, and its router might choose other experts. So hidden states are compared to the bit after
each pass, of prompts and of single tokens, also of recorded and repeated ones: the last hidden
state and its norm, from which each rank of the head's group computes its logits, and whatever moves
from one group to another.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch import Tensor

from engine import CommError, Model, load_model
from engine.backends.cpu.thread_comm import ThreadCommunicator
from engine.model.forward.communicator import Group
from engine.model.forward.context import Context
from engine.model.layers.norm import Norm
from tests.helpers.golden import (
    MIN_BAR,
    TOLERANCE,
    golden_logits,
    golden_models,
    golden_path,
    kernel_bars,
    nmse,
)
from tests.helpers.passes import forward_alone


@dataclass(frozen=True)
class Rig:
    """Ranks and the split of a model over them.

    Attributes:
        split: share of each rank.
        chunk: number of prompt tokens computed at once.
        n_decode: number of tokens at the end that are computed one by one.
        options: further options of `load_model`.
    """

    split: tuple[float, ...]
    chunk: int = 9
    n_decode: int = 6
    options: Mapping[str, Any] = field(default_factory=dict)


GROUPED = {"split_mode": "groups"}
RIGS = {
    "two of different speed": Rig((3, 1)),
    "three": Rig((3, 1, 2), chunk=7),
    "five": Rig((1, 2, 3, 4, 5), chunk=14),
    "eight": Rig((5, 1, 2, 1, 3, 1, 1, 2), chunk=11),
    "eight, some with nothing": Rig((4, 0, 1, 0, 0, 2, 1, 0)),
    "all on one of three": Rig((0, 1, 0), chunk=16, n_decode=4),
    "five in groups of three and two": Rig(
        (2, 1, 1, 3, 1), chunk=8, options={**GROUPED, "groups": (3, 2)}
    ),
    "eight in groups of different size": Rig(
        (3, 1, 2, 1, 1, 2, 0, 1), chunk=10, options={**GROUPED, "groups": (3, 2, 3)}
    ),
}
SOME = [
    "llama-gqa-q4_k_m", "glm4moe-q4_k_m", "deepseek3-mla-q4_k_m", "qwen3next-q4_k_m",
    "falcon-h1-q4_k_m", "gptoss-mxfp4", "gemma3-q4_0", "cohere2-q4_k_m",
]  # fmt: skip
"""Golden models: dense, experts with a shared one, latent attention, two kinds of recurrent layers,
sinks, a tied head with norms behind each all-reduce, and attention and FFN in parallel."""


class Pass(NamedTuple):
    """Hidden states that were compared in one pass.

    Attributes:
        n_ranks: number of ranks that computed logits.
        n_places: number of places in the model where several ranks had a hidden state.
        last: bits of the last hidden state, and of its norm.
    """

    n_ranks: int
    n_places: int
    last: tuple[bytes, bytes]


class Streams:
    """Hidden states of the pass under way, by place in the model and rank."""

    def __init__(self) -> None:
        self._normed: dict[int, Tensor] = {}
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._group: Group = ()
        self.forget()

    def forget(self) -> None:
        """Discard what was noted of a pass."""
        self._last: dict[int, tuple[bytes, bytes]] = {}
        self._moved: dict[int, dict[int, bytes]] = {}
        self._n_moved: dict[int, int] = {}

    def note_norm(self, rank: int, x: Tensor) -> None:
        """Note a norm's result on a rank; the last one is what its head reads."""
        self._normed[rank] = x

    def note_head(self, rank: int, stream: Tensor) -> None:
        """Note that a rank has logits; repeated tokens have theirs from the same tensors."""
        self._pairs[id(stream)] = stream, self._normed[rank]

    def note_last(self, rank: int, group: Group, stream: Tensor) -> None:
        """Note that a rank gives its logits away, also those of a repeated token."""
        self._group = group
        _, normed = self._pairs[id(stream)]
        self._last[rank] = _bits(stream), _bits(normed)

    def note_moved(self, rank: int, x: Tensor | None) -> None:
        """Note a rank's hidden state where it may move to another group."""
        place = self._n_moved[rank] = self._n_moved.get(rank, 0) + 1
        if x is not None:
            self._moved.setdefault(place, {})[rank] = _bits(x)

    def check(self) -> Pass:
        """Check that all ranks had the same hidden states, and return what was compared."""
        assert set(self._last) == set(self._group), "all of the group computed logits"
        assert len(set(self._last.values())) == 1, f"ranks {self._group} computed from others"
        for place, found in self._moved.items():
            assert len(set(found.values())) == 1, f"before block {place} of {sorted(found)}"
        n_places = sum(len(found) > 1 for found in self._moved.values())
        compared = Pass(len(self._last), n_places, next(iter(self._last.values())))
        self.forget()
        return compared


def _bits(x: Tensor) -> bytes:
    assert x.numel(), "there is something to compare"
    return x.contiguous().numpy().tobytes()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Return the hidden states of models loaded from now on, recorded tokens included."""
    found = Streams()
    norm, head, enter = Norm.__call__, Context.gather, Context.enter
    gather = ThreadCommunicator.gather

    def normed(self: Norm, x: Tensor, ctx: Context) -> Tensor:
        y = norm(self, x, ctx)
        found.note_norm(ctx.rank, y)
        return y

    def headed(self: Context, x: Tensor | None, alike: Tensor) -> Tensor | None:
        found.note_head(self.rank, alike)
        return head(self, x, alike)

    def gathered(
        self: ThreadCommunicator, x: Tensor | None, group: Group, alike: Tensor
    ) -> Tensor | None:
        found.note_last(self.rank, group, alike)
        return gather(self, x, group, alike)

    def entered(self: Context, x: Tensor | None, group: Group, *more: Any) -> Tensor | None:
        found.note_moved(self.rank, x)
        return enter(self, x, group, *more)

    monkeypatch.setattr(Norm, "__call__", normed)
    monkeypatch.setattr(Context, "gather", headed)
    monkeypatch.setattr(Context, "enter", entered)
    monkeypatch.setattr(ThreadCommunicator, "gather", gathered)
    return found


def computed(model: Model, ids: list[int], rig: Rig, streams: Streams) -> tuple[Any, list[Pass]]:
    """Return the logits of all tokens, and what was compared after each pass."""
    streams.check()  # passes that warm up
    n_prompt = len(ids) - rig.n_decode
    starts = [*range(0, n_prompt, rig.chunk), *range(n_prompt, len(ids))]
    rows, passes = [], []
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        rows.append(forward_alone(model.runtime.runner, ids[start:stop], start))
        passes.append(streams.check())
    for bits in zip(*(one.last for one in passes), strict=True):
        assert len(set(bits)) == len(starts), "each pass has streams of its own"
    return np.concatenate(rows), passes


def check(name: str, rig: Rig, streams: Streams, *, has_kernels: bool) -> None:
    """Check that all ranks compute from the same bits, and the right logits."""
    ids, expected = golden_logits(name)
    path, devices = golden_path(f"{name}.gguf"), ["cpu"] * len(rig.split)
    options = {"n_ctx": len(ids), "kv_type": "f32", **rig.options}
    with load_model(path, devices, rig.split, **options) as model:
        if not has_kernels:  # what warms up is only done for kernels
            forward_alone(model.runtime.runner, ids[:1], 0)
        logits, passes = computed(model, ids, rig, streams)
        group = model.runtime.ranks[0].model.split.last_group
        assert {one.n_ranks for one in passes} == {len(group)}
        assert passes[0].n_places > 0 or len(group) == 1
        if has_kernels:
            refusals = [rank.refusal for rank in model.runtime.ranks]
            assert all(rank.recordings for rank in model.runtime.ranks), refusals
    bar = kernel_bars().get(name, MIN_BAR) if has_kernels else TOLERANCE
    assert nmse(logits, expected) <= bar


@pytest.fixture(params=["kernels", "reference"])
def has_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Choose the CPU's kernels, which repeat recorded tokens, or the exact reference."""
    monkeypatch.setenv("TANDEM_BACKEND", "" if request.param == "kernels" else request.param)
    return bool(request.param == "kernels")


@pytest.mark.parametrize("rig", ["three", "eight", "five in groups of three and two"])
@pytest.mark.parametrize("name", SOME)
def test_all_ranks_compute_from_the_same_bits(
    name: str, rig: str, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TANDEM_BACKEND", raising=False)
    check(name, RIGS[rig], streams, has_kernels=True)


@pytest.mark.parametrize("rig", RIGS)
def test_each_rig(rig: str, streams: Streams, has_kernels: bool) -> None:
    check("mixtral-q4_k_m", RIGS[rig], streams, has_kernels=has_kernels)


@pytest.mark.slow
@pytest.mark.parametrize("rig", RIGS)
@pytest.mark.parametrize("name", golden_models() or ["none"])
def test_each_model_on_each_rig(name: str, rig: str, streams: Streams, has_kernels: bool) -> None:
    check(name, RIGS[rig], streams, has_kernels=has_kernels)


def test_there_are_more_ranks_than_heads_for_keys() -> None:
    """Query heads are cut finer than these, which then lie on several ranks."""
    with load_model(golden_path("llama-gqa-q4_k_m.gguf"), n_ctx=8) as model:
        assert model.runtime.hp.n_head_kv[0] < len(RIGS["eight"].split)


def test_a_rank_that_differs_by_a_bit_is_noticed(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test notices it, or would prove nothing, and the engine, which names the rank."""
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
    name = "llama-gqa-q4_k_m"
    reduce = ThreadCommunicator.all_reduce

    def off_by_a_bit(
        self: ThreadCommunicator, x: Tensor | None, group: Group, *more: Any
    ) -> Tensor:
        total = reduce(self, x, group, *more)
        return total.nextafter(total + 1) if self.rank == 1 else total

    monkeypatch.setattr(ThreadCommunicator, "all_reduce", off_by_a_bit)
    with pytest.raises(CommError, match="different numbers for the same input"):
        check(name, RIGS["two of different speed"], streams, has_kernels=False)
    with pytest.raises(AssertionError, match=r"ranks \(0, 1\) computed from others"):
        streams.check()
