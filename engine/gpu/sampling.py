"""Tokens drawn on the device, as `engine.sampler.Sampler` would draw them.

The random numbers are the host's, uploaded before they are used, so a seed gives the same text.
Probabilities are F64 as on the host; results differ only where sums in another order round to
another side of a limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.config import SamplingParams
from engine.gpu.kernels import sampling as kernels
from engine.gpu.launch import Start, launch, watched
from engine.gpu.steps import power_of_two
from engine.host_memory import HostTensor
from engine.sampler import History, Sampler, penalises

ROOM = 1024
"""Candidates that one program can sort; tokens at the edge of top-k may be more than k."""

MOST_WANTED = 768
"""The largest top-k that is served; what is looked at for top-p without top-k."""

FEW = 128
"""Candidates up to which a smaller sort is enough."""

BLOCK = 1024
"""Logits of one program."""

MOST_GROUPS = 8192
"""Maxima that one program can hold; at least half as many there are of a large vocabulary."""

N_UNIFORM = 256
"""Random numbers on the device; a half is written while the other is used."""

N_HISTORY = 8192
"""The longest window of the penalties that is served."""

RING = 16
"""Steps whose tokens the device remembers for the host."""

NEVER = -(1 << 30)
"""The count of a token that must not come: below zero also after it has occurred."""


WORD_BITS, ENTRY_BITS = kernels.WORD_BITS.value, kernels.ENTRY_BITS.value
DRAWN, FOR_HOST = kernels.DRAWN.value, kernels.FOR_HOST.value


class Entry(NamedTuple):
    """What the ring holds of a step.

    Attributes:
        number: of the step, from 1.
        is_drawn: there is a token; otherwise the host has to draw it.
    """

    number: int
    is_drawn: bool
    token: int

    @staticmethod
    def of(word: int) -> Entry:
        """Unpack it."""
        ending = word >> WORD_BITS & (1 << ENTRY_BITS - WORD_BITS) - 1
        return Entry(word >> ENTRY_BITS, ending == DRAWN, word & (1 << WORD_BITS) - 1)


def settings_of(params: SamplingParams, n_vocab: int) -> Sequence[float] | None:
    """What the kernels read of `params`, in their order; None where the host has to draw."""
    p = params
    n_last = p.repeat_last_n if penalises(p) else 0
    if n_last > N_HISTORY:
        return None
    penalties = [p.repeat_penalty, p.frequency_penalty, p.presence_penalty, float(n_last != 0)]
    if p.temperature <= 0:
        return [*penalties, n_last, 1, 1, 1, -math.inf, 1, 0]
    n_wanted = min(p.top_k or MOST_WANTED, n_vocab)
    is_open = p.top_k == 0 and p.top_p >= 1 and p.min_p <= 0
    if n_wanted > MOST_WANTED or p.typical_p < 1 or is_open:
        return None
    min_p = float(np.float32(math.log(p.min_p))) if p.min_p > 0 else -math.inf
    is_by_id = p.top_k == 0 and p.top_p >= 1
    return [*penalties, n_last, n_wanted, p.top_k > 0, p.top_p, min_p, p.temperature, is_by_id]


class DeviceSampler:
    """Memory and kernels that draw one token after the other on a device.

    Args:
        n_vocab: logits of a token.

    Attributes:
        ring: (RING,), int64: what the last steps drew, see `Entry`.
    """

    def __init__(self, device: torch.device, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        self._device = device
        self._group = max(1, power_of_two(-(-n_vocab // MOST_GROUPS)))
        self._block = max(BLOCK, self._group)
        self._n_program = -(-n_vocab // self._block)
        f32, f64, i32, i64 = torch.float32, torch.float64, torch.int32, torch.int64
        self._settings = self._zeros(kernels.N_SETTING, f64)
        self._set(settings_of(SamplingParams(temperature=0), n_vocab))
        self._state = self._zeros(kernels.N_STATE, i64)
        self._counts = self._zeros(n_vocab, i32)
        self._history = self._zeros(N_HISTORY, i32)
        self._uniforms = self._zeros(N_UNIFORM, f64)
        self._host_uniforms = HostTensor((N_UNIFORM,), f64, device)
        self.ring = self._zeros(RING, i64)
        self._penalised = self._zeros(n_vocab, f32)
        self._maxima = self._zeros(self._n_program * self._block // self._group, f32)
        self._limits = self._zeros(2, f32)
        self._found = self._zeros(2, i32)
        self._candidates = self._zeros(ROOM, i64)
        self._sums = self._zeros(self._n_program, f64)
        self._sampler: Sampler | None = None
        self._n_uploaded = self._n_taken = 0

    def _set(self, settings: Sequence[float] | None) -> bool:
        if settings is None:
            return False
        self._settings.copy_(torch.tensor(settings, dtype=torch.float64))
        return True

    def _zeros(self, n: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(n, dtype=dtype, device=self._device)

    @property
    def n_bytes(self) -> int:
        """Of the device's memory."""
        tensors = [x for x in vars(self).values() if isinstance(x, Tensor)]
        return sum(x.nbytes for x in tensors)

    def begin(self, sampler: Sampler, never: Sequence[int], n_step: int) -> bool:
        """Go on as `sampler` would; False where that has to draw by itself.

        No step may be under way.

        Args:
            never: tokens that must not come.
            n_step: steps so far: the next one has the number after that.
        """
        if not self._set(settings_of(sampler.params, self.n_vocab)):
            return False
        self._sampler = sampler
        self._n_uploaded = self._n_taken = 0
        tokens = sampler.history.tokens if penalises(sampler.params) else []
        self._state.copy_(torch.tensor([n_step, 0, len(tokens), 0]))
        self._count(sampler.history, tokens, never)
        self.supply()
        return True

    def rest(self, n_step: int) -> None:
        """Let the next steps draw nothing; for arguments see `begin`."""
        self._state.copy_(torch.tensor([n_step, 0, 0, FOR_HOST]))

    def _count(self, history: History, tokens: Sequence[int], never: Sequence[int]) -> None:
        self._counts.zero_()
        if tokens:
            there = torch.tensor(tokens[:N_HISTORY], dtype=torch.int32)
            self._history[: len(there)].copy_(there)  # without effect where nothing is forgotten
            ids, counts = (torch.from_numpy(x).to(self._device) for x in history.counts())
            self._counts.index_copy_(0, ids, counts.to(torch.int32))
        if never:
            self._counts.index_fill_(0, torch.tensor(never).to(self._device), NEVER)

    def took(self) -> None:
        """Note that the host has a token that the device drew: the sampler's next draw is later."""
        assert self._sampler is not None, "nothing was begun"
        if not self._sampler.is_greedy:
            self._sampler.uniforms.draw()
            self._n_taken += 1

    def supply(self) -> None:
        """Upload random numbers where all that stand there were used, before the next step."""
        assert self._sampler is not None, "nothing was begun"
        if self._sampler.is_greedy:
            return
        half = N_UNIFORM // 2
        while self._n_uploaded - self._n_taken <= half:
            first, n_ahead = self._n_uploaded % N_UNIFORM, self._n_uploaded - self._n_taken
            numbers = self._sampler.uniforms.ahead(n_ahead + half)[n_ahead:]
            source = self._host_uniforms.value[first : first + half]
            source.copy_(torch.tensor(numbers, dtype=torch.float64))
            self._uniforms[first : first + half].copy_(source, non_blocking=True)
            self._n_uploaded += half

    def draw(self, logits: Tensor, token: Tensor, position: Tensor) -> None:
        """Draw a token from logits (n_vocab,), F32: a step, to be captured.

        Args:
            token: (1,), int64, becomes the token that was drawn.
            position: (1,), is raised by one.
        """
        settings, state, limits, found = self._settings, self._state, self._limits, self._found
        n_sum, sums = self._n_program, power_of_two(self._n_program)
        factor = math.gcd(self.n_vocab, 16)
        launch(
            kernels.survey, (n_sum,), logits, self._counts, settings, self._penalised, self._maxima,
            self.n_vocab, FACTOR=factor, BLOCK=self._block, GROUP=self._group,
        )  # fmt: skip
        n_group = min(len(self._maxima), -(-self.n_vocab // self._group))
        size = power_of_two(n_group)
        launch(
            kernels.bound, (1,), self._maxima, settings, limits, found, n_group,
            SIZE=size, num_warps=16 if size > 2048 else 4,
        )  # fmt: skip
        launch(
            kernels.gather, (n_sum,), self._penalised, settings, limits, found, self._candidates,
            self._sums, self.n_vocab, FACTOR=factor, BLOCK=self._block, ROOM=ROOM,
        )  # fmt: skip
        launch(
            kernels.draw, (1,), self._candidates, self._sums, settings, limits, found,
            self._uniforms, state, self._counts, self._history, token, position, self.ring, n_sum,
            FEW=FEW, ROOM=ROOM, SUMS=sums, UNIFORMS=N_UNIFORM, RING=RING,
        )  # fmt: skip


def draw_starts(n_vocab: int) -> list[Start]:
    """The kernels of a draw, to compile them before there is memory."""
    meta, starts = torch.device("meta"), list[Start]()

    def note(start: Start) -> bool:
        starts.append(start)
        return False

    place = torch.empty(1, dtype=torch.int64, device=meta)
    with watched(note):
        DeviceSampler(meta, n_vocab).draw(torch.empty(n_vocab, device=meta), place, place)
    return starts
