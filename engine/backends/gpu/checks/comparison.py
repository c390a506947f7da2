"""Comparison of kernels' results with torch's, with tolerances for rounding.

A product `y = w · x` of one row is compared relative to its size s = |w| rms(x): relative to y
itself, the error would mean nothing if y were near zero. Errors come from

- activations as bytes: at most 1/254 of the largest of 16; for normal numbers 0.4 % of s (rms);
- activations and weights in BF16: at most 2^-9 of each number; 0.2 % of s (rms) for both.

Checks first multiply numbers that neither rounding changes, then normal ones. With the former, the
error is zero in gemv, and 0.1 % with weights in BF16. In a row of 4096, one wrong weight changes y
by about 1 % of s, a wrong block of 32 by 12 %, a wrong row or scale by all of it. Each number has
its own tolerance, so that one wrong row cannot hide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.backends.cpu.weights import JoinedColumns
from engine.backends.gpu.comm.one_shot import OneShot
from engine.backends.gpu.decode.sampling import DeviceSampler, RingEntry
from engine.backends.gpu.launch.configs import allows
from engine.decoding.sampling.sampler import Sampler
from engine.model.forward.cache import LayerCache
from engine.model.forward.expert_rows import Groups
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.backends.gpu.loading.dry_run import OpCall, OpCallLog
    from engine.model.forward.ops import Ops
    from engine.model.layers.module import Slot


class Bar(NamedTuple):
    """Largest acceptable errors, relative to the results' size: per number, and RMS."""

    each: float
    rms: float


EXACT = Bar(1e-6, 1e-6)
"""Limits for numbers that are only copied or converted."""

IN_F32 = Bar(2e-3, 5e-4)
"""Limits for results computed in F32 from the same numbers, summed in a different order."""

OF_WHOLE = Bar(0.02, 0.005)
"""Limits for products with activations that rounding leaves unchanged; BF16 may round weights."""

OF_ROUNDED = Bar(0.06, 0.015)
"""Limits for products with rounded activations: 8 and 3 standard deviations of the errors above."""

OF_SEVERAL = Bar(0.12, 0.03)
"""Limits for results that are rounded several times: the outputs of experts and attention."""

KV_BARS = {
    "f32": EXACT, "f16": Bar(2e-3, 1e-3), "bf16": Bar(2e-2, 5e-3), "q8_0": Bar(0.03, 0.01),
    "q4_0": Bar(0.5, 0.15),
}  # fmt: skip
"""Limits for values read back from a KV cache, by type: half a step, for normal numbers."""

SMALLEST = 1e-20  # minimum size of a result, so that rows of zeros can be compared


class Pair(NamedTuple):
    """A result, and what torch computes.

    Attributes:
        size: size of the result, broadcast to its shape; None for each number's absolute value
            plus the root mean square of all numbers.
    """

    found: Tensor
    expected: Tensor
    bar: Bar
    size: Tensor | None = None

    @property
    def agrees(self) -> bool:
        """Whether the two differ only by rounding; False if there is a NaN."""
        if self.found.shape != self.expected.shape:
            return False
        if not self.found.numel():
            return True
        expected = self.expected.float()
        size = self.size
        if size is None:
            size = expected.abs() + expected.square().mean().sqrt()
        error = (self.found.float() - expected).abs() / size.clamp(min=SMALLEST)
        largest, mean = error.max(), error.square().mean().sqrt()
        return bool((largest <= self.bar.each) & (mean <= self.bar.rms))


def all_agree(pairs: Sequence[Pair]) -> bool:
    """Return whether all results are right."""
    return all(pair.agrees for pair in pairs)


SAMPLING = "sampling"
"""Name under which the sampling kernels may be refused."""

SETTINGS = (
    SamplingParams(temperature=0, repeat_penalty=1),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1),
    SamplingParams(temperature=1.2, top_k=0, top_p=0.7, min_p=0.02, seed=2),
    SamplingParams(
        temperature=0.9, top_k=20, top_p=1, min_p=0, seed=3, repeat_last_n=16,
        repeat_penalty=1.3, frequency_penalty=0.15, presence_penalty=0.4,
    ),
)  # fmt: skip
"""Sampling settings, each with different steps: greedy; all filters; no top-k; penalties."""

HISTORY = 16  # tokens before the first sampled one; they are among the most likely
SPREAD = 3.0  # standard deviation of the logits


@dataclass(frozen=True, slots=True)
class Drawing:
    """Logits from which ranks sample; `slices` has the token ids of each rank's part."""

    n_vocab: int
    slices: tuple[range, ...]
    n_embd: int

    @property
    def name(self) -> str:
        """Text that distinguishes the kernels' variants and program counts."""
        widths = "+".join(str(len(own)) for own in self.slices)
        return f"{SAMPLING} {widths} of {self.n_vocab}, {self.n_embd}"


def drawn_tokens(drawing: Drawing, device: torch.device) -> list[Pair]:
    """Sample tokens on a device and on the host; return the two rows of ids."""
    if not allows(device, SAMPLING):
        return []
    random = np.random.default_rng(0)
    found, expected = [], []
    for params in SETTINGS:
        logits = SPREAD * random.standard_normal(drawing.n_vocab, np.float32)
        last = np.argpartition(-logits, HISTORY)[:HISTORY].tolist()
        expected.append(_sampler(params, last).sample(logits))
        found.append(_drawn(drawing, partial(_sampler, params, last), logits, device))
    return [Pair(torch.tensor(found), torch.tensor(expected), EXACT)]


def _sampler(params: SamplingParams, history: Sequence[int]) -> Sampler:
    sampler = Sampler(params)
    sampler.accept_all(history)
    return sampler


def _drawn(
    drawing: Drawing, make: Callable[[], Sampler], logits: NDArray[np.float32],
    device: torch.device,
) -> int:  # fmt: skip
    """Return the token that all ranks sample; -1 if any samples none, or if the tokens differ."""
    n_rank = len(drawing.slices)
    group = tuple(range(n_rank))
    messages: list[Tensor | None] = [None] * n_rank
    hidden = torch.ones(drawing.n_embd, device=device)
    tokens: set[int] = set()
    for _ in range(1 if n_rank == 1 else 2):
        tokens.clear()
        for seat, own in enumerate(drawing.slices):
            exchange = _Collected(seat, group, messages)
            sampler = DeviceSampler(device, drawing.n_vocab, own, exchange)
            if not sampler.begin(make(), (), 0):
                return -1
            token = torch.zeros(1, dtype=torch.int64, device=device)
            mine = torch.from_numpy(logits[own.start : own.stop]).to(device) if own else None
            sampler.sample(mine, token, torch.zeros_like(token), hidden)
            entry = RingEntry.of(int(sampler.ring[0]))
            tokens.add(entry.token if entry.is_sampled and entry.token == int(token) else -1)
    return tokens.pop() if len(tokens) == 1 else -1


class _Collected(OneShot):
    """Exchange of messages between ranks that run in turn on one device."""

    def __init__(self, seat: int, group: tuple[int, ...], messages: list[Tensor | None]) -> None:
        self.seat, self.group, self._messages = seat, group, messages

    def words(self, own: Tensor) -> Tensor:
        """Return all messages, with this rank's own in place of missing ones."""
        self._messages[self.seat] = own.clone()
        return torch.stack([own if m is None else m for m in self._messages])


UNIT = 64  # divisor of random integers, for a mean square near one
LEAST, LARGEST = (32, 127)  # their magnitudes: large enough for any wrong weight to matter
EACH = 8  # every eighth number is LARGEST, so that each block of activations has one
NEGATIVE = ("rate",)  # operand fields that are negative in every model: decay exponents


class StandIns:
    """Arguments for a dry run's operations, as a real pass would have them.

    The dry run's modules are given the rank's weights, so they become the rank's modules.

    Args:
        dry: tensors of the dry run's model, and the attributes that hold its stand-ins.
        real: the same for the rank, in the same order.
        caches: keys and values for the rank's layers.
    """

    def __init__(
        self, log: OpCallLog, dry: Iterable[Slot], real: Iterable[Slot],
        caches: Iterable[LayerCache], device: torch.device,
    ) -> None:  # fmt: skip
        self.device = device
        self._log = log
        self._held: list[object] = []  # keeps their ids from being reused
        self._objects: dict[int, object] = {}
        self._memory: dict[int, Tensor] = {}
        for mine, theirs in zip(dry, real, strict=True):
            was = getattr(mine.owner, mine.attribute)
            value = getattr(theirs.owner, theirs.attribute)
            setattr(mine.owner, mine.attribute, value)
            self._map(was, value)
        for was, cache in zip(log.context.cache.layers, caches, strict=True):
            self._map(was, cache)
        for numbers, was in log.context.indices.items():
            self._map(was, torch.tensor(numbers, device=device))
        self._generator = torch.Generator(device).manual_seed(0)

    def _map(self, was: object, value: object) -> None:
        self._held.append(was)
        self._objects[id(was)] = value
        if isinstance(was, Tensor) and isinstance(value, Tensor):
            self._memory[_storage(was)] = value
        if isinstance(was, JoinedColumns) and isinstance(value, JoinedColumns):
            for part, real in zip(was.parts, value.parts, strict=True):
                self._map(part, real)

    def arguments(
        self, call: OpCall, ops: Ops, *, whole: bool = False
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return a call's positional and named arguments.

        Args:
            ops: operations that group rows by expert.
            whole: whether to use 64ths, which rounding to bytes or BF16 does not change, instead
                of normally distributed numbers.
        """
        memory = dict(self._memory)

        def made(value: Any, name: str = "") -> Any:
            if id(value) in self._objects:
                return self._objects[id(value)]
            if isinstance(value, Groups):
                return ops.assign(*made(self._log.routings[id(value)][1]))[1]
            if isinstance(value, Tensor):
                x = self._tensor(value, memory, whole=whole)
                return -x.abs() if name in NEGATIVE else x
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*map(made, value, value._fields))
            if isinstance(value, tuple | list):
                return type(value)(map(made, value))
            return value

        return made(call.args), {name: made(value) for name, value in call.named.items()}

    def _tensor(self, like: Tensor, memory: dict[int, Tensor], *, whole: bool) -> Tensor:
        key = _storage(like)
        if key not in memory:
            memory[key] = self._random(like, whole=whole)
        base = memory[key]
        offset = base.storage_offset() + like.storage_offset()
        return base.as_strided(like.shape, like.stride(), offset)

    def _random(self, like: Tensor, *, whole: bool) -> Tensor:
        n = like.untyped_storage().nbytes() // like.dtype.itemsize
        if not like.is_floating_point():  # positions
            return torch.arange(n, dtype=like.dtype, device=self.device)
        if not whole:
            return torch.randn(n, generator=self._generator, device=self.device).to(like.dtype)
        x = torch.randint(LEAST, LARGEST + 1, (n,), generator=self._generator, device=self.device)
        x[::EACH] = LARGEST
        signs = torch.randint(0, 2, (n,), generator=self._generator, device=self.device) * 2 - 1
        return (x * signs / UNIT).to(like.dtype)


def _storage(x: Tensor) -> int:
    """Return a key that all views of one tensor share."""
    key: int = x.untyped_storage()._cdata
    return key
