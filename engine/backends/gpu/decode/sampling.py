"""Sampling on the device, with the results of `engine.decoding.sampling.sampler.Sampler`.

The host's random numbers are uploaded before they are used, so a given seed gives the same text.
Probabilities are F64, as on the host; results differ only where sums in a different order round to
the other side of a limit.

If each of several ranks has a slice of the vocabulary, they exchange little more than their slices'
top tokens, `message_bytes` each, and all sample the same token from these:

- greedy, and any top-k up to `most_sent`: exactly as the host or a single rank would;
- min-p without top-p and top-k: as the host would, if all tokens that pass are among those sent;
- top-p without top-k: likewise, but the total probability is the sum of the ranks' sums, each
  relative to its slice's largest logit. Its last bits may differ from the host's, and so may the
  token if the first tokens' probability equals top-p up to these bits;
- otherwise, and if too many tokens are equally likely, the host samples.

All ranks sample the same token only if their arithmetic is the same, as on GPUs from one maker. The
next step names a rank that continued with a different token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.gpu.comm.one_shot import OneShot, OneShotGroups
from engine.backends.gpu.decode.sampler_slots import FEW, RING, SamplerSlots, settings_of
from engine.backends.gpu.elementwise import power_of_two
from engine.backends.gpu.kernels import sampling, sharded_sampling
from engine.backends.gpu.launch.kernel_launch import KernelLaunch, intercept_launches, launch
from engine.decoding.sampling.sampler import ROOM, Sampler, most_sent
from engine.hardware.devices.topology import Routes
from engine.hardware.host_memory import HostTensor

FEW_SENT = 64  # candidates per rank up to which a smaller sort is enough
N_UNIFORM = 256  # random numbers on the device; one half is written while the other is used

WORD_BITS, ENTRY_BITS = sampling.WORD_BITS.value, sampling.ENTRY_BITS.value
DRAWN, WRONG = sampling.DRAWN.value, sampling.WRONG.value
N_HEAD = sharded_sampling.N_HEAD.value


class RingEntry(NamedTuple):
    """Result of one step, as the device writes it to the ring.

    Attributes:
        number: the step's number, counted from 1.
        is_sampled: whether the device sampled a token; if not, the host must, if `wrong` is empty.
        token: the sampled token.
        wrong: seats of the ranks whose numbers differ from most ranks' numbers, or both seats if
            there are two ranks. Results since the last token cannot be trusted.
    """

    number: int
    is_sampled: bool
    token: int
    wrong: tuple[int, ...] = ()

    @staticmethod
    def of(word: int) -> RingEntry:
        """Unpack a ring entry from its word."""
        ending = word >> WORD_BITS & (1 << ENTRY_BITS - WORD_BITS) - 1
        number, token = word >> ENTRY_BITS, word & (1 << WORD_BITS) - 1
        if ending == WRONG:
            seats = tuple(n for n in range(WORD_BITS) if token >> n & 1)
            return RingEntry(number, is_sampled=False, token=0, wrong=seats)
        return RingEntry(number, ending == DRAWN, token)


def message_bytes(n_rank: int) -> int:
    """Return the bytes that a rank sends to each other rank per token, without packet flags."""
    return 0 if n_rank == 1 else 8 * (N_HEAD + most_sent(n_rank))


class DeviceSampler:
    """Samples one token after another on a device.

    Args:
        n_vocab: number of logits per token, on all ranks together.
        own: token ids of this rank's logits; None for all.
        one_shot: message exchange with the other ranks that sample the same token, or None. The
            ranks' slices cover every id once. A token's count in the history is on the rank with
            its logit, 4 bytes each; the window itself (`N_HISTORY`) is on every rank.

    Attributes:
        n_rank: number of ranks that sample together.
        slots: memory and kernels for its only slot.
    """

    def __init__(
        self, device: torch.device, n_vocab: int, own: range | None = None,
        one_shot: OneShot | None = None,
    ) -> None:  # fmt: skip
        self.n_vocab = n_vocab
        self.n_rank = 1 if one_shot is None else len(one_shot.group)
        self._one_shot = one_shot if self.n_rank > 1 else None
        self._own = range(n_vocab) if own is None else own
        assert self._one_shot or len(self._own) == n_vocab, "no rank has the other logits"
        self.slots = SamplerSlots(device, self._own, 1, N_UNIFORM)
        self._host_uniforms = HostTensor((N_UNIFORM,), torch.float64, device)
        n_word = message_bytes(self.n_rank) // 8
        self._message = torch.zeros(n_word, dtype=torch.int64, device=device)
        self._sampler: Sampler | None = None
        self._n_uploaded = self._n_taken = 0

    @property
    def ring(self) -> Tensor:
        """Results of the last steps, (RING,), int64; see `RingEntry`."""
        return self.slots.ring

    @property
    def n_bytes(self) -> int:
        return self.slots.n_bytes + self._message.nbytes

    def begin(self, sampler: Sampler, never: Sequence[int], n_step: int) -> bool:
        """Sample like `sampler` from the next step on; return False if the host must sample.

        Call only while no step is in flight.

        Args:
            sampler: the host's sampler, with its history and random numbers.
            never: banned tokens.
            n_step: number of steps so far; the next step's number is one more.
        """
        settings = settings_of(sampler, self.n_vocab, self.n_rank)
        if settings is None:
            return False
        self._sampler = sampler
        self._n_uploaded = self._n_taken = 0
        self.slots.begin(settings, sampler, never, n_step)
        self.upload_uniforms()
        return True

    def pause(self, n_step: int) -> None:
        """Make the next steps sample nothing; for `n_step`, see `begin`."""
        self.slots.pause(n_step)

    def advance(self, *, is_first: bool = True) -> None:
        """Consume the random number of a sampled token that the host has read.

        `is_first` is True for one of the ranks that share the sampler, and False for the others.
        """
        assert self._sampler is not None, "nothing was begun"
        if not self._sampler.is_greedy:
            if is_first:
                self._sampler.uniforms.draw()
            self._n_taken += 1

    def upload_uniforms(self) -> None:
        """Replace used random numbers with new ones before the next step needs them."""
        assert self._sampler is not None, "nothing was begun"
        if self._sampler.is_greedy:
            return
        half = N_UNIFORM // 2
        while self._n_uploaded - self._n_taken <= half:
            first, n_ahead = self._n_uploaded % N_UNIFORM, self._n_uploaded - self._n_taken
            numbers = self._sampler.uniforms.peek(n_ahead + half)[n_ahead:]
            source = self._host_uniforms.value[first : first + half]
            source.copy_(torch.tensor(numbers, dtype=torch.float64))
            self.slots.uniforms[first : first + half].copy_(source, non_blocking=True)
            self._n_uploaded += half

    def sample(
        self, logits: Tensor | None, token: Tensor, position: Tensor, hidden: Tensor | None = None
    ) -> None:
        """Sample a token from logits; this is a step, to be captured.

        Args:
            logits: this rank's logits (n_own,), F32; None if it has none.
            token: (1,), int64, set to the sampled token.
            position: (1,), incremented.
            hidden: the hidden state behind the logits, (n_embd,), F32, for ranks to compare; None
                for a rank that samples alone.
        """
        if self._one_shot is None:
            self.slots.survey(logits)
            self.slots.draw(token, position)
        else:
            self.slots.survey(logits, hidden)
            self._offer(token, hidden is not None)
            messages = self._one_shot.words(self._message.view(torch.int32))
            self._decide(messages.view(torch.int64), self._one_shot, token, position)

    def _offer(self, token: Tensor, is_checked: bool) -> None:
        slots, n_sum, n_own = self.slots, self.slots.n_program, len(self._own)
        launch(
            sharded_sampling.offer, (n_sum,), slots.penalised, slots.settings, slots.limits,
            slots.found, slots.candidates, slots.sums, slots.state, token, self._message, n_own,
            self._own.start, n_sum, HAS_STREAM=is_checked, FACTOR=slots.factor, BLOCK=slots.block,
            FEW=FEW, ROOM=ROOM, SENT=most_sent(self.n_rank), SUMS=power_of_two(n_sum),
        )  # fmt: skip

    def _decide(self, messages: Tensor, one_shot: OneShot, token: Tensor, position: Tensor) -> None:
        slots = self.slots
        launch(
            sharded_sampling.decide, (1,), messages, self._message, slots.settings, slots.uniforms,
            slots.state, slots.counts, slots.history, token, position, slots.ring, one_shot.seat,
            self.n_rank, len(self._own), self._own.start, self.n_vocab,
            SEATS=power_of_two(self.n_rank), FEW=min(FEW_SENT, most_sent(self.n_rank)),
            SENT=most_sent(self.n_rank), UNIFORMS=N_UNIFORM, RING=RING,
        )  # fmt: skip


def sampling_starts(
    n_vocab: int, own: range | None = None, n_rank: int = 1, n_embd: int | None = None
) -> list[KernelLaunch]:
    """Return a step's kernel launches, so that they can be compiled for the current target.

    Args:
        own: token ids of the rank's logits; None for all.
        n_rank: number of ranks that sample together.
        n_embd: size of the hidden state that ranks compare, if they do.
    """
    meta, starts = torch.device("meta"), list[KernelLaunch]()

    def note(start: KernelLaunch) -> bool:
        starts.append(start)
        return False

    place = torch.empty(1, dtype=torch.int64, device=meta)
    one_shot = OneShotGroups([meta] * n_rank, Routes()).one_shot(0, tuple(range(n_rank)))
    sampler = DeviceSampler(meta, n_vocab, own, one_shot)
    logits = torch.empty(n_vocab if own is None else len(own), device=meta)
    hidden = None if n_embd is None else torch.empty(n_embd, device=meta)
    with intercept_launches(note):
        sampler.sample(logits, place, place, hidden)
    return starts


class SampledRow(NamedTuple):
    """A row of logits to sample.

    Attributes:
        row: index of the row.
        token: the row's input token.
        sampler: samples the next token; it has accepted `token`.
        never: banned tokens; always the same for a given sampler.
        mask: which tokens are allowed, (at most n_vocab,); None for all.
    """

    row: int
    token: int
    sampler: Sampler
    never: Sequence[int]
    mask: NDArray[np.bool_] | None = None


@dataclass(slots=True)
class _Slot:
    """The host's record of a slot.

    Attributes:
        sampler: the sampler that the slot serves; None if the slot's memory is stale.
        revision: the sampler's revision when the slot last sampled.
        token: the token sampled then; -1 if none yet.
        n_step: number of steps so far.
        used: number of the pass in which it was last used.
    """

    sampler: Sampler | None = None
    revision: int = 0
    token: int = -1
    n_step: int = 0
    used: int = 0

    def follows(self, row: SampledRow) -> bool:
        """Return whether the slot is up to date with a row's sampler."""
        is_next = row.sampler.revision == self.revision + 1 and row.token == self.token
        return row.sampler is self.sampler and is_next


class RowSampler:
    """Samples rows of logits on a device, up to `n_slot` at a time."""

    def __init__(self, device: torch.device, n_vocab: int, n_slot: int) -> None:
        self._n_vocab, self.n_slot = n_vocab, n_slot
        self._memory = SamplerSlots(device, range(n_vocab), n_slot, 1, has_masks=True)
        self._next = torch.zeros(2, n_slot, dtype=torch.int64, device=device)  # unused output
        self._slots = [_Slot() for _ in range(n_slot)]
        self._n_pass = 0

    def sample(self, logits: Tensor, rows: Sequence[SampledRow]) -> list[int | None]:
        """Sample the next token for each row; return None if the host has to.

        This takes a random number from each sampler, which has yet to accept its token.

        Args:
            logits: F32 (n, n_vocab) on the device.
            rows: at most `n_slot`, each with a different sampler.
        """
        self._n_pass += 1
        slots = self._slots_for(rows)
        served = [(row, slot) for row, slot in zip(rows, slots, strict=True) if slot is not None]
        if served:
            self._start(logits, served)
        words = self._memory.ring.tolist() if served else []
        return [None if n is None else self._result(n, words) for n in slots]

    def _slots_for(self, rows: Sequence[SampledRow]) -> list[int | None]:
        """Return each row's slot, up to date with its sampler; None if it has none."""
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
        """Write a sampler's state to a slot; return False if the kernels lack its settings."""
        settings = settings_of(row.sampler, self._n_vocab)
        if settings is None:
            return False
        slot = self._slots[n]
        self._memory.begin(settings, row.sampler, row.never, slot.n_step, n)
        slot.sampler, slot.used = row.sampler, self._n_pass
        return True

    def _start(self, logits: Tensor, served: Sequence[tuple[SampledRow, int]]) -> None:
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
        slot = self._slots[n]
        entry = RingEntry.of(words[n * RING + (slot.n_step - 1) % RING])
        sampler = slot.sampler
        assert sampler is not None, "the slot was assigned"
        assert entry.number == slot.n_step, "the device has taken the step"
        if not entry.is_sampled:
            slot.sampler = None
            return None
        if not sampler.is_greedy:
            sampler.uniforms.draw()
        slot.token = entry.token
        return entry.token
