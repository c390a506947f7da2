"""Memory for samplers on a device, one slot each, and the kernels that all samplers launch.

A slot holds a sampler's state between tokens: settings, history, its tokens' counts, and the
results for the host. Launching the kernels samples one row of logits for each of some slots; see
`engine.backends.gpu.kernels.sampling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.gpu.elementwise import power_of_two
from engine.backends.gpu.kernels import sampling as kernels
from engine.backends.gpu.launch.kernel_launch import launch
from engine.decoding.sampling.sampler import (
    N_HISTORY,
    ROOM,
    Sampler,
    most_sent,
    penalises,
    why_on_host,
)
from engine.sampling_params import SamplingParams


def settings_of(sampler: Sampler, n_vocab: int, n_rank: int = 1) -> Sequence[float] | None:
    """Return a sampler's settings in the kernels' format; None if the host must sample."""
    if why_on_host(sampler, n_vocab, n_rank):
        return None
    most = most_sent(n_rank)
    p = sampler.params
    n_last = p.repeat_last_n if penalises(p) else 0
    penalties = [p.repeat_penalty, p.frequency_penalty, p.presence_penalty, float(n_last != 0)]
    if p.temperature <= 0:
        return [*penalties, n_last, 1, 1, 1, -math.inf, 1, 0]
    n_wanted = min(p.top_k or most, n_vocab)
    min_p = float(np.float32(math.log(p.min_p))) if p.min_p > 0 else -math.inf
    is_by_id = p.top_k == 0 and p.top_p >= 1
    return [*penalties, n_last, n_wanted, p.top_k > 0, p.top_p, min_p, p.temperature, is_by_id]


FEW = 128  # candidates up to which a smaller sort is enough
BLOCK = 1024  # logits per program
STREAM_BLOCK = 2048  # elements of a hidden state to read per iteration
RING = 16  # steps that a slot's ring keeps for the host
NEVER = -(1 << 30)  # count of a banned token: negative even if the token occurs

MAX_GROUPS = 8192
"""Max. groups of logits; one program holds their maxima. Large vocabularies have at least half."""

FOR_HOST = kernels.FOR_HOST.value


class SamplerSlots:
    """A device's slots; all tensors are dense, with slots as the first dimension.

    Args:
        own: token ids of the logits.
        n_uniform: number of random numbers in each slot's ring.
        has_masks: whether there may be masks of allowed tokens.

    Attributes:
        n_program: programs per row.
        ring: results of each slot's last steps, int64 (n_slot * RING,).
    """

    def __init__(
        self, device: torch.device, own: range, n_slot: int, n_uniform: int, *,
        has_masks: bool = False,
    ) -> None:  # fmt: skip
        self._device, self.own, self.n_uniform = device, own, n_uniform
        n_own, self._n_wide = len(own), max(1, len(own))
        self._group = max(1, power_of_two(-(-n_own // MAX_GROUPS)))
        self.block = max(BLOCK, self._group)
        self.n_program = max(1, -(-n_own // self.block))
        self._n_maxima = self.n_program * self.block // self._group
        self.factor = math.gcd(n_own, 16)
        f32, f64, i32, i64 = torch.float32, torch.float64, torch.int32, torch.int64

        def zeros(n: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(n_slot * n, dtype=dtype, device=device)

        self.settings = zeros(kernels.N_SETTING.value, f64)
        self.state = zeros(kernels.N_STATE.value, i64)
        self.counts = zeros(self._n_wide, i32)
        self.history = zeros(N_HISTORY, i32)
        self.uniforms = zeros(n_uniform, f64)
        self.ring = zeros(RING, i64)
        self.penalised = zeros(self._n_wide, f32)
        self._maxima = zeros(self._n_maxima, f32)
        self.limits = zeros(kernels.N_LIMIT.value, f32)
        self.found = zeros(kernels.N_FACT.value, i32)
        self.candidates = zeros(ROOM, i64)
        self.sums = zeros(self.n_program, f64)
        self._n_words = -(-n_own // 32) if has_masks else 1
        self._masks = zeros(self._n_words, i32)
        self._rows = zeros(3, i32)
        self._rows[2::3] = -1
        greedy = settings_of(Sampler(SamplingParams(temperature=0)), max(1, n_own))
        assert greedy is not None, "devices sample greedily"
        for slot in range(n_slot):
            self._part(self.settings, slot).copy_(torch.tensor(greedy, dtype=f64))

    @property
    def n_bytes(self) -> int:
        return sum(x.nbytes for x in vars(self).values() if isinstance(x, Tensor))

    @property
    def n_slot(self) -> int:
        return len(self._rows) // 3

    def begin(
        self, settings: Sequence[float], sampler: Sampler, never: Sequence[int], n_step: int,
        slot: int = 0,
    ) -> None:  # fmt: skip
        """Write a sampler's state to a slot that has no step in flight.

        Args:
            settings: its settings; see `settings_of`.
            never: banned tokens.
            n_step: number of the slot's steps so far; the next step's number is one more.
        """
        self._part(self.settings, slot).copy_(torch.tensor(settings, dtype=torch.float64))
        tokens = sampler.history.tokens if penalises(sampler.params) else []
        self._part(self.state, slot).copy_(torch.tensor([n_step, 0, len(tokens), 0]))
        counts = self._part(self.counts, slot)
        counts.zero_()
        if tokens:
            there = torch.tensor(tokens[:N_HISTORY], dtype=torch.int32)
            # unused if no token leaves the penalty window
            self._part(self.history, slot)[: len(there)].copy_(there)
            ids, numbers = sampler.history.counts()
            is_own = (ids >= self.own.start) & (ids < self.own.stop)
            at = torch.from_numpy(ids[is_own] - self.own.start).to(self._device)
            counts.index_copy_(
                0, at, torch.from_numpy(numbers[is_own]).to(self._device, torch.int32)
            )
        own_never = [token - self.own.start for token in never if token in self.own]
        if own_never:
            counts.index_fill_(0, torch.tensor(own_never).to(self._device), NEVER)

    def pause(self, n_step: int, slot: int = 0) -> None:
        """Make a slot's next steps sample nothing; for `n_step`, see `begin`."""
        self._part(self.state, slot).copy_(torch.tensor([n_step, 0, 0, FOR_HOST]))

    def choose_rows(
        self, rows: Sequence[tuple[int, int]], masks: Mapping[int, NDArray[np.bool_]]
    ) -> None:
        """Write which rows of logits the next step samples; the default is row 0 in slot 0.

        Args:
            rows: pairs of row index and slot.
            masks: which tokens are allowed, (at most n_vocab,), by slot.
        """
        numbers = {slot: number for number, slot in enumerate(masks)}
        found = [(row, slot, numbers.get(slot, -1)) for row, slot in rows]
        # the source is not pinned, so it is read before the call returns
        self._rows[: 3 * len(found)].copy_(
            torch.tensor(found, dtype=torch.int32).view(-1), non_blocking=True
        )
        if masks:
            bits = np.zeros((len(masks), 4 * self._n_words), np.uint8)
            for line, mask in zip(bits, masks.values(), strict=True):
                packed = np.packbits(mask, bitorder="little")
                line[: len(packed)] = packed
            words = torch.from_numpy(bits.view(np.int32)).view(-1)
            self._masks[: len(words)].copy_(words, non_blocking=True)

    def survey(self, logits: Tensor | None, hidden: Tensor | None = None, n_row: int = 1) -> None:
        """Apply penalties, and find each row's largest logit and a bound for its candidates.

        Args:
            logits: F32 (rows, n) or (n,), dense; None if there are none.
            hidden: hidden state (n_embd,), F32, for a checksum; or None.
            n_row: number of rows to sample.
        """
        n_own = len(self.own)
        launch(
            kernels.survey, (self.n_program, n_row), self.penalised if logits is None else logits,
            self._rows, self._masks, self.counts, self.settings, self.penalised, self._maxima,
            n_own, FACTOR=self.factor, BLOCK=self.block, GROUP=self._group,
        )  # fmt: skip
        n_group = min(self._n_maxima, -(-n_own // self._group))
        size = power_of_two(n_group)
        launch(
            kernels.bound, (1, n_row), self._maxima, self._maxima if hidden is None else hidden,
            self._rows, self.settings, self.limits, self.found, n_group, self._n_maxima,
            0 if hidden is None else hidden.numel(), SIZE=size, HAS_STREAM=hidden is not None,
            STREAM_BLOCK=STREAM_BLOCK, num_warps=16 if size > 2048 else 4,
        )  # fmt: skip

    def draw(self, token: Tensor, position: Tensor, n_row: int = 1) -> None:
        """Sample a token for each surveyed row; see `kernels.sampling.draw`.

        `token` and `position`, int64 and integers (n_slot,), are written for the next step.
        """
        n_own = len(self.own)
        launch(
            kernels.gather, (self.n_program, n_row), self.penalised, self._rows, self.settings,
            self.limits, self.found, self.candidates, self.sums, n_own, FACTOR=self.factor,
            BLOCK=self.block, ROOM=ROOM,
        )  # fmt: skip
        launch(
            kernels.draw, (1, n_row), self._rows, self.candidates, self.sums, self.settings,
            self.limits, self.found, self.uniforms, self.state, self.counts, self.history, token,
            position, self.ring, self.n_program, n_own, self.n_uniform, N_HISTORY, FEW=FEW,
            ROOM=ROOM, SUMS=power_of_two(self.n_program), RING=RING,
        )  # fmt: skip

    def _part(self, tensor: Tensor, slot: int) -> Tensor:
        size = len(tensor) // self.n_slot
        return tensor[slot * size : (slot + 1) * size]
