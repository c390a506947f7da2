"""Sampling on the device, with the results of `engine.sampling.sampler.Sampler`.

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

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.config.sampling import SamplingParams
from engine.devices.routes import Routes
from engine.gpu.comm.one_shot import OneShotGroups
from engine.gpu.decode.sampler_settings import settings_of
from engine.gpu.elementwise import power_of_two
from engine.gpu.kernels import sample_token, sharded_sampling
from engine.gpu.kernels import sampling as kernels
from engine.gpu.launch.kernel_launch import KernelLaunch, intercept_launches, launch
from engine.hardware.host_memory import HostTensor
from engine.sampling.on_device import N_HISTORY, ROOM, most_sent
from engine.sampling.sampler import Sampler, penalises
from engine.sampling.steps import TokenHistory

FEW = 128
"""Number of candidates up to which a smaller sort is enough."""

FEW_SENT = 64
"""Number of candidates per rank up to which a smaller sort is enough."""

BLOCK = 1024
"""Logits of one program."""

STREAM_BLOCK = 2048
"""Elements of a hidden state that are read at once."""

MOST_GROUPS = 8192
"""Most groups of logits: one program holds their maxima. Large vocabularies have at least half."""

N_UNIFORM = 256
"""Random numbers on the device: one half is written while the other is used."""

RING = 16
"""Number of steps whose results stay in the ring for the host."""

NEVER = -(1 << 30)
"""Count of a token that must not be sampled: it stays below zero even if the token occurs."""

WORD_BITS, ENTRY_BITS = sample_token.WORD_BITS.value, sample_token.ENTRY_BITS.value
DRAWN, FOR_HOST = sample_token.DRAWN.value, sample_token.FOR_HOST.value
WRONG = sample_token.WRONG.value
N_HEAD = sharded_sampling.N_HEAD.value


class WordExchange(Protocol):
    """Exchange of small messages between ranks, on their devices.

    Attributes:
        seat: this rank's index in the group.
        group: ranks that exchange messages.
    """

    seat: int
    group: tuple[int, ...]

    def words(self, own: Tensor) -> Tensor:
        """Gather all members' messages (m,), int32, as (n, m) in group order, equal on all."""
        ...


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
        ring: (RING,), int64: results of the last steps, see `RingEntry`.
    """

    def __init__(
        self,
        device: torch.device,
        n_vocab: int,
        own: range | None = None,
        one_shot: WordExchange | None = None,
    ) -> None:
        self.n_vocab = n_vocab
        self.n_rank = 1 if one_shot is None else len(one_shot.group)
        self._one_shot = one_shot if self.n_rank > 1 else None
        self._own = range(n_vocab) if own is None else own
        assert self._one_shot or len(self._own) == n_vocab, "no rank has the other logits"
        self._device = device
        n_own = len(self._own)
        self._group = max(1, power_of_two(-(-n_own // MOST_GROUPS)))
        self._block = max(BLOCK, self._group)
        self._n_program = max(1, -(-n_own // self._block))
        f32, f64, i32, i64 = torch.float32, torch.float64, torch.int32, torch.int64
        self._settings = self._zeros(sample_token.N_SETTING, f64)
        self._set(self.settings_of(Sampler(SamplingParams(temperature=0))))
        self._state = self._zeros(sample_token.N_STATE, i64)
        self._counts = self._zeros(max(1, n_own), i32)
        self._history = self._zeros(N_HISTORY, i32)
        self._uniforms = self._zeros(N_UNIFORM, f64)
        self._host_uniforms = HostTensor((N_UNIFORM,), f64, device)
        self.ring = self._zeros(RING, i64)
        self._penalised = self._zeros(max(1, n_own), f32)
        self._maxima = self._zeros(self._n_program * self._block // self._group, f32)
        self._limits = self._zeros(2, f32)
        self._found = self._zeros(sample_token.N_FACT, i32)
        self._candidates = self._zeros(ROOM, i64)
        self._sums = self._zeros(self._n_program, f64)
        self._message = self._zeros(message_bytes(self.n_rank) // 8, i64)
        self._sampler: Sampler | None = None
        self._n_uploaded = self._n_taken = 0

    def settings_of(self, sampler: Sampler) -> Sequence[float] | None:
        """Return a sampler's settings as the kernels read them; None where the host must sample."""
        return settings_of(sampler, self.n_vocab, self.n_rank)

    def _set(self, settings: Sequence[float] | None) -> bool:
        if settings is None:
            return False
        self._settings.copy_(torch.tensor(settings, dtype=torch.float64))
        return True

    def _zeros(self, n: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(n, dtype=dtype, device=self._device)

    @property
    def n_bytes(self) -> int:
        """Bytes taken on the device."""
        tensors = [x for x in vars(self).values() if isinstance(x, Tensor)]
        return sum(x.nbytes for x in tensors)

    def begin(self, sampler: Sampler, never: Sequence[int], n_step: int) -> bool:
        """Sample as `sampler` would from the next step on; return False if the host must sample.

        No step may be under way.

        Args:
            sampler: the host's sampler, with its history and random numbers.
            never: tokens that must not be sampled.
            n_step: number of steps so far; the next step's number is one more.
        """
        if not self._set(self.settings_of(sampler)):
            return False
        self._sampler = sampler
        self._n_uploaded = self._n_taken = 0
        tokens = sampler.history.tokens if penalises(sampler.params) else []
        self._state.copy_(torch.tensor([n_step, 0, len(tokens), 0]))
        self._count(sampler.history, tokens, never)
        self.upload_uniforms()
        return True

    def pause(self, n_step: int) -> None:
        """Let the next steps sample nothing; for `n_step` see `begin`."""
        self._state.copy_(torch.tensor([n_step, 0, 0, FOR_HOST]))

    def _count(self, history: TokenHistory, tokens: Sequence[int], never: Sequence[int]) -> None:
        """Write the history, the counts of its tokens, and the tokens never to be sampled."""
        self._counts.zero_()
        if tokens:
            there = torch.tensor(tokens[:N_HISTORY], dtype=torch.int32)
            self._history[: len(there)].copy_(there)  # without effect where nothing is forgotten
            ids, counts = history.counts()
            is_own = (ids >= self._own.start) & (ids < self._own.stop)
            at = torch.from_numpy(ids[is_own] - self._own.start).to(self._device)
            there = torch.from_numpy(counts[is_own]).to(self._device, torch.int32)
            self._counts.index_copy_(0, at, there)
        own_never = [token - self._own.start for token in never if token in self._own]
        if own_never:
            self._counts.index_fill_(0, torch.tensor(own_never).to(self._device), NEVER)

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
            self._uniforms[first : first + half].copy_(source, non_blocking=True)
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
        n_own, settings, found = len(self._own), self._settings, self._found
        launch(
            kernels.survey, (self._n_program,), self._penalised if logits is None else logits,
            self._counts, settings, self._penalised, self._maxima, n_own,
            FACTOR=math.gcd(n_own, 16), BLOCK=self._block, GROUP=self._group,
        )  # fmt: skip
        n_group = min(len(self._maxima), -(-n_own // self._group))
        size, is_checked = power_of_two(n_group), hidden is not None and self._one_shot is not None
        launch(
            kernels.bound, (1,), self._maxima, self._maxima if hidden is None else hidden, settings,
            self._limits, found, n_group, 0 if hidden is None else hidden.numel(),
            SIZE=size, HAS_STREAM=is_checked, STREAM_BLOCK=STREAM_BLOCK,
            num_warps=16 if size > 2048 else 4,
        )  # fmt: skip
        if self._one_shot is None:
            self._sample_alone(token, position)
        else:
            self._offer(token, is_checked)
            told = self._one_shot.words(self._message.view(torch.int32))
            self._decide(told.view(torch.int64), self._one_shot, token, position)

    def _sample_alone(self, token: Tensor, position: Tensor) -> None:
        """Sample a token from this rank's candidates."""
        n_sum, sums, factor = self._n_program, self._sums, math.gcd(self.n_vocab, 16)
        launch(
            kernels.gather, (n_sum,), self._penalised, self._settings, self._limits, self._found,
            self._candidates, sums, self.n_vocab, FACTOR=factor, BLOCK=self._block, ROOM=ROOM,
        )  # fmt: skip
        launch(
            kernels.draw, (1,), self._candidates, sums, self._settings, self._limits, self._found,
            self._uniforms, self._state, self._counts, self._history, token, position, self.ring,
            n_sum, self.n_vocab, FEW=FEW, ROOM=ROOM, SUMS=power_of_two(n_sum), UNIFORMS=N_UNIFORM,
            RING=RING,
        )  # fmt: skip

    def _offer(self, token: Tensor, is_checked: bool) -> None:
        """Write this rank's top candidates, and facts about its logits, to its message."""
        n_sum, n_own = self._n_program, len(self._own)
        launch(
            sharded_sampling.offer, (n_sum,), self._penalised, self._settings, self._limits,
            self._found, self._candidates, self._sums, self._state, token, self._message, n_own,
            self._own.start, n_sum, HAS_STREAM=is_checked, FACTOR=math.gcd(n_own, 16),
            BLOCK=self._block, FEW=FEW, ROOM=ROOM, SENT=most_sent(self.n_rank),
            SUMS=power_of_two(n_sum),
        )  # fmt: skip

    def _decide(
        self, told: Tensor, one_shot: WordExchange, token: Tensor, position: Tensor
    ) -> None:
        """Sample a token from the messages of all ranks, `told`."""
        launch(
            sharded_sampling.decide, (1,), told, self._message, self._settings, self._uniforms,
            self._state, self._counts, self._history, token, position, self.ring, one_shot.seat,
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
