"""Samples rows of logits of several sequences on a device, each as a sampler of its own would.

The host gives the token before, so nothing runs ahead: a step samples the logits that a pass has
just started to compute, and the host reads one word for each row. What a sampler knows stays in a
slot of the device's memory as long as it is sampled there; a slot is written anew if the host has
sampled, or taken back, a token meanwhile.

Which tokens the form of an answer allows depends on the token before, so it is never sampled ahead:
the host makes the masks while devices compute the pass, and sends them before the kernels start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.gpu.decode.sampler_settings import settings_of
from engine.backends.gpu.decode.sampler_slots import RING, SamplerSlots
from engine.backends.gpu.decode.sampling import RingEntry
from engine.decoding.sampling.sampler import Sampler


class SampledRow(NamedTuple):
    """A row of logits to sample.

    Attributes:
        row: index of the row.
        token: token that was computed there.
        sampler: samples the next one; it has accepted `token`.
        never: tokens that must not come; always the same for one sampler.
        mask: tokens that may come this time, (at most n_vocab,); None for all.
    """

    row: int
    token: int
    sampler: Sampler
    never: Sequence[int]
    mask: NDArray[np.bool_] | None = None


@dataclass(slots=True)
class _Slot:
    """What the host knows of a slot.

    Attributes:
        sampler: the sampler that the slot serves; None if what it holds is of no use.
        revision: the sampler's revision when the slot sampled last.
        token: token that was sampled then, -1 before.
        n_step: number of steps so far.
        used: number of the pass in which it was used last.
    """

    sampler: Sampler | None = None
    revision: int = 0
    token: int = -1
    n_step: int = 0
    used: int = 0

    def follows(self, row: SampledRow) -> bool:
        """Return whether the slot knows all that a row's sampler does."""
        is_next = row.sampler.revision == self.revision + 1 and row.token == self.token
        return row.sampler is self.sampler and is_next


class RowSampler:
    """Samples rows of logits on a device.

    Args:
        n_vocab: number of logits of a row.
        n_slot: most rows that are sampled at once.
    """

    def __init__(self, device: torch.device, n_vocab: int, n_slot: int) -> None:
        self._n_vocab, self.n_slot = n_vocab, n_slot
        self._memory = SamplerSlots(device, range(n_vocab), n_slot, 1, has_masks=True)
        self._next = torch.zeros(2, n_slot, dtype=torch.int64, device=device)  # nobody reads it
        self._slots = [_Slot() for _ in range(n_slot)]
        self._n_pass = 0

    def sample(self, logits: Tensor, rows: Sequence[SampledRow]) -> list[int | None]:
        """Sample the next token of each row; None where the host has to.

        This takes a random number of the samplers, which are still to accept their tokens.

        Args:
            logits: F32 (n, n_vocab) on the device.
            rows: at most `n_slot`, each with another sampler.
        """
        self._n_pass += 1
        slots = self._placed(rows)
        served = [(row, slot) for row, slot in zip(rows, slots, strict=True) if slot is not None]
        if served:
            self._start(logits, served)
        words = self._memory.ring.tolist() if served else []
        return [None if n is None else self._result(n, words) for n in slots]

    def _placed(self, rows: Sequence[SampledRow]) -> list[int | None]:
        """Return the slot of each row, which holds what its sampler knows; None without one."""
        known = {id(slot.sampler): n for n, slot in enumerate(self._slots) if slot.sampler}
        found = [known.get(id(row.sampler)) for row in rows]
        for n in found:
            if n is not None:
                self._slots[n].used = self._n_pass
        for at, row in enumerate(rows):
            n = found[at]
            if n is None:
                n = min(range(self.n_slot), key=lambda n: self._slots[n].used)
            found[at] = n if self._slots[n].follows(row) or self._begin(n, row) else None
        return found

    def _begin(self, n: int, row: SampledRow) -> bool:
        """Write what a sampler knows to a slot; return False if its settings are unknown there."""
        settings = settings_of(row.sampler, self._n_vocab)
        if settings is None:
            return False
        slot = self._slots[n]
        self._memory.begin(settings, row.sampler, row.never, slot.n_step, n)
        slot.sampler, slot.used = row.sampler, self._n_pass
        return True

    def _start(self, logits: Tensor, served: Sequence[tuple[SampledRow, int]]) -> None:
        """Start the kernels for rows in their slots."""
        memory, n_row = self._memory, len(served)
        numbers = [0.0] * self.n_slot
        for row, n in served:
            slot = self._slots[n]
            slot.n_step += 1
            slot.revision = row.sampler.revision
            numbers[n] = 0.0 if row.sampler.is_greedy else row.sampler.uniforms.peek(1)[0]
        masks = {n: row.mask for row, n in served if row.mask is not None}
        memory.choose_rows([(row.row, n) for row, n in served], masks)
        memory.uniforms.copy_(torch.tensor(numbers, dtype=torch.float64), non_blocking=True)
        memory.survey(logits.contiguous(), n_row=n_row)
        memory.draw(self._next[0], self._next[1], n_row)

    def _result(self, n: int, words: Sequence[int]) -> int | None:
        """Return the token that a slot has sampled; None if it could not."""
        slot = self._slots[n]
        entry = RingEntry.of(words[n * RING + (slot.n_step - 1) % RING])
        sampler = slot.sampler
        assert sampler is not None, "it was placed here"
        assert entry.number == slot.n_step, "the device has taken the step"
        if not entry.is_sampled:
            slot.sampler = None
            return None
        if not sampler.is_greedy:
            sampler.uniforms.draw()
        slot.token = entry.token
        return entry.token
