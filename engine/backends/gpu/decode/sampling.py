"""Sampling on the device, with the results of `engine.decoding.sampling.sampler.Sampler`.

The random numbers are the host's, uploaded before they are used, so a seed gives the same text.
Probabilities are F64 as on the host; results differ only where sums in another order round to
another side of a limit.

Where each of several ranks has a slice of the vocabulary, they exchange the top tokens of their
slices and little else, `message_bytes` each, and all sample the same token from these:

- greedy, and any top-k up to `most_sent`: exactly as the host and as one rank alone;
- min-p without top-p and top-k: as the host, if all tokens that pass are among those sent;
- top-p without top-k: as well, but the total probability is the sum of the ranks' sums, each
  relative to the largest logit of its slice. It may differ from the host's in its last bits, and
  so may the token where the probability of the first tokens lies within these bits of top-p;
- otherwise, and where too many tokens are equally likely, the host samples.

All ranks sample the same token only with the same arithmetic, which GPUs of one maker have. The
next step names a rank that went on with another token.
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

FEW_SENT = 64
"""Number of candidates per rank up to which a smaller sort is enough."""

N_UNIFORM = 256
"""Random numbers on the device: one half is written while the other is used."""

WORD_BITS, ENTRY_BITS = sampling.WORD_BITS.value, sampling.ENTRY_BITS.value
DRAWN, WRONG = sampling.DRAWN.value, sampling.WRONG.value
N_HEAD = sharded_sampling.N_HEAD.value


class RingEntry(NamedTuple):
    """Result of one step, as the device writes it to the ring.

    Attributes:
        number: number of the step, from 1.
        is_sampled: whether the device sampled a token; else the host must, if `wrong` is empty.
        token: the sampled token.
        wrong: seats of ranks that computed with other numbers than most, or of both if two differ.
            What was computed since the last token cannot be trusted.
    """

    number: int
    is_sampled: bool
    token: int
    wrong: tuple[int, ...] = ()

    @staticmethod
    def of(word: int) -> RingEntry:
        """Unpack an entry from a word of the ring."""
        ending = word >> WORD_BITS & (1 << ENTRY_BITS - WORD_BITS) - 1
        number, token = word >> ENTRY_BITS, word & (1 << WORD_BITS) - 1
        if ending == WRONG:
            seats = tuple(n for n in range(WORD_BITS) if token >> n & 1)
            return RingEntry(number, is_sampled=False, token=0, wrong=seats)
        return RingEntry(number, ending == DRAWN, token)


def message_bytes(n_rank: int) -> int:
    """Return the bytes that a rank sends to each other one per token, without packet flags."""
    return 0 if n_rank == 1 else 8 * (N_HEAD + most_sent(n_rank))


class DeviceSampler:
    """Samples one token after another on a device.

    Args:
        n_vocab: number of logits of a token, on all ranks together.
        own: token ids of this rank's logits; None for all.
        one_shot: message exchange with the other ranks that sample the same token; None if there
            are none. The ranks' slices cover every id once. Counts of tokens in the history lie on
            the rank with the logit, 4 bytes each; the window itself (`N_HISTORY`) on every rank.

    Attributes:
        n_rank: number of ranks that sample together.
        slots: memory and kernels of its only slot.
    """

    def __init__(
        self,
        device: torch.device,
        n_vocab: int,
        own: range | None = None,
        one_shot: OneShot | None = None,
    ) -> None:
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

    def settings_of(self, sampler: Sampler) -> Sequence[float] | None:
        """Return a sampler's settings as the kernels read them; None where the host must sample."""
        return settings_of(sampler, self.n_vocab, self.n_rank)

    @property
    def n_bytes(self) -> int:
        """Bytes taken on the device."""
        return self.slots.n_bytes + self._message.nbytes

    def begin(self, sampler: Sampler, never: Sequence[int], n_step: int) -> bool:
        """Sample as `sampler` would from the next step on; return False if the host must sample.

        No step may be under way.

        Args:
            sampler: the host's sampler, with its history and random numbers.
            never: tokens that must not be sampled.
            n_step: number of steps so far; the next step's number is one more.
        """
        settings = self.settings_of(sampler)
        if settings is None:
            return False
        self._sampler = sampler
        self._n_uploaded = self._n_taken = 0
        self.slots.begin(settings, sampler, never, n_step)
        self.upload_uniforms()
        return True

    def pause(self, n_step: int) -> None:
        """Let the next steps sample nothing; for `n_step` see `begin`."""
        self.slots.pause(n_step)

    def advance(self, *, is_first: bool = True) -> None:
        """Note that the host has read a sampled token, and consume its random number.

        Args:
            is_first: True for one of the ranks that share the sampler, False for the others.
        """
        assert self._sampler is not None, "nothing was begun"
        if not self._sampler.is_greedy:
            if is_first:
                self._sampler.uniforms.draw()
            self._n_taken += 1

    def upload_uniforms(self) -> None:
        """Upload random numbers over used ones, before the next step needs them."""
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
        """Sample a token from logits: a step, to be captured.

        Args:
            logits: this rank's logits (n_own,), F32; None if it has none.
            token: (1,), int64, set to the sampled token.
            position: (1,), increased by one.
            hidden: hidden state (n_embd,), F32, that the logits were computed from; ranks compare
                theirs. None for a rank that samples alone.
        """
        if self._one_shot is None:
            self.slots.survey(logits)
            self.slots.draw(token, position)
        else:
            self.slots.survey(logits, hidden)
            self._offer(token, hidden is not None)
            told = self._one_shot.words(self._message.view(torch.int32))
            self._decide(told.view(torch.int64), self._one_shot, token, position)

    def _offer(self, token: Tensor, is_checked: bool) -> None:
        """Write this rank's top candidates, and facts about its logits, to its message."""
        slots, n_sum, n_own = self.slots, self.slots.n_program, len(self._own)
        launch(
            sharded_sampling.offer, (n_sum,), slots.penalised, slots.settings, slots.limits,
            slots.found, slots.candidates, slots.sums, slots.state, token, self._message, n_own,
            self._own.start, n_sum, HAS_STREAM=is_checked, FACTOR=slots.factor, BLOCK=slots.block,
            FEW=FEW, ROOM=ROOM, SENT=most_sent(self.n_rank), SUMS=power_of_two(n_sum),
        )  # fmt: skip

    def _decide(self, told: Tensor, one_shot: OneShot, token: Tensor, position: Tensor) -> None:
        """Sample a token from the messages of all ranks, `told`."""
        slots = self.slots
        launch(
            sharded_sampling.decide, (1,), told, self._message, slots.settings, slots.uniforms,
            slots.state, slots.counts, slots.history, token, position, slots.ring, one_shot.seat,
            self.n_rank, len(self._own), self._own.start, self.n_vocab,
            SEATS=power_of_two(self.n_rank), FEW=min(FEW_SENT, most_sent(self.n_rank)),
            SENT=most_sent(self.n_rank), UNIFORMS=N_UNIFORM, RING=RING,
        )  # fmt: skip


def sampling_starts(
    n_vocab: int, own: range | None = None, n_rank: int = 1, n_embd: int | None = None
) -> list[KernelLaunch]:
    """Return the kernel launches of a step, to compile them for the target in use.

    Args:
        n_vocab: number of logits of a token, on all ranks together.
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
