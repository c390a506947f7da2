"""Tokens drawn on the device, as `engine.sampling.sampler.Sampler` would draw them.

The random numbers are the host's, uploaded before they are used, so a seed gives the same text.
Probabilities are F64 as on the host; results differ only where sums in another order round to
another side of a limit.

Where several ranks have a slice of the vocabulary each, they exchange the likeliest tokens of their
slices and little else, `message_bytes` each, and all draw the same token from these:

- greedy, and any top-k up to `most_sent`: as the host, and as exactly as one rank;
- min-p without top-p and top-k: as the host, if what may pass is found in what was sent;
- top-p without top-k: the same, with a total that adds up the ranks' sums, each relative to the
  largest logit of its slice. So it may differ from the host's in its last bits, and the token where
  what is reached by a number of tokens lies within these bits of top-p;
- otherwise, and where too many tokens are equally likely, the host draws.

That all draw the same takes the same arithmetic, which GPUs of one maker have. Who followed another
token than the others is named at the next step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.config import SamplingParams
from engine.devices.routes import Ways
from engine.gpu.comm.one_shot import OneShotGroups
from engine.gpu.elementwise import power_of_two
from engine.gpu.kernels import sample_token, sharded_sampling
from engine.gpu.kernels import sampling as kernels
from engine.gpu.launch.kernel_launch import KernelLaunch, intercept_launches, launch
from engine.hardware.host_memory import HostTensor
from engine.sampling.sampler import (
    MinP,
    Penalties,
    Sampler,
    SamplingTemperature,
    TokenHistory,
    TopK,
    TopP,
    all_known,
    penalises,
)

KNOWN_STEPS = (Penalties, TopK, TopP, MinP, SamplingTemperature)
"""Step types that the kernels compute, in this order; the host draws where there is any other."""

ROOM = 1024
"""Candidates that one program can sort; tokens at the edge of top-k may be more than k."""

MOST_WANTED = 768
"""The largest top-k that is served; what is looked at for top-p without top-k."""

FEW = 128
"""Candidates up to which a smaller sort is enough."""

MOST_SENT = 256
"""Candidates that a rank tells the others at most: 2 KB."""

FEW_SENT = 64
"""Candidates of a rank up to which a smaller sort is enough."""

BLOCK = 1024
"""Logits of one program."""

STREAM_BLOCK = 2048
"""Numbers of a residual stream that are read at once."""

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


WORD_BITS, ENTRY_BITS = sample_token.WORD_BITS.value, sample_token.ENTRY_BITS.value
DRAWN, FOR_HOST, WRONG = (
    sample_token.DRAWN.value,
    sample_token.FOR_HOST.value,
    sample_token.WRONG.value,
)
N_HEAD = sharded_sampling.N_HEAD.value


class WordExchange(Protocol):
    """How ranks exchange small messages on their devices.

    Attributes:
        group: the ranks that do, each at its `seat`.
    """

    seat: int
    group: tuple[int, ...]

    def words(self, own: Tensor) -> Tensor:
        """What each member gives, (m,) int32 each, as (n, m): with the same bits on all."""
        ...


class RingEntry(NamedTuple):
    """What the ring holds of a step.

    Attributes:
        number: of the step, from 1.
        is_drawn: there is a token; otherwise the host has to draw it, if nothing is wrong.
        wrong: seats of ranks that computed with other numbers than most; of two that differ both.
            What was computed since the last token cannot be trusted.
    """

    number: int
    is_sampled: bool
    token: int
    wrong: tuple[int, ...] = ()

    @staticmethod
    def of(word: int) -> RingEntry:
        """Unpack it."""
        ending = word >> WORD_BITS & (1 << ENTRY_BITS - WORD_BITS) - 1
        number, token = word >> ENTRY_BITS, word & (1 << WORD_BITS) - 1
        if ending == WRONG:
            seats = tuple(n for n in range(WORD_BITS) if token >> n & 1)
            return RingEntry(number, is_sampled=False, token=0, wrong=seats)
        return RingEntry(number, ending == DRAWN, token)


def most_sent(n_rank: int) -> int:
    """The largest top-k that so many ranks serve; what a rank tells without top-k."""
    return MOST_WANTED if n_rank == 1 else min(MOST_SENT, ROOM // power_of_two(n_rank))


def message_bytes(n_rank: int) -> int:
    """What a rank tells each other one for a token, without what a one-shot all-reduce adds."""
    return 0 if n_rank == 1 else 8 * (N_HEAD + most_sent(n_rank))


def settings_of(sampler: Sampler, n_vocab: int, n_rank: int = 1) -> Sequence[float] | None:
    """Return what the kernels read of a sampler's settings; None where the host has to draw."""
    if not all_known(sampler.steps, KNOWN_STEPS):
        return None
    most = most_sent(n_rank)
    p = sampler.params
    n_last = p.repeat_last_n if penalises(p) else 0
    if n_last > N_HISTORY:
        return None
    penalties = [p.repeat_penalty, p.frequency_penalty, p.presence_penalty, float(n_last != 0)]
    if p.temperature <= 0:
        return [*penalties, n_last, 1, 1, 1, -math.inf, 1, 0]
    n_wanted = min(p.top_k or most, n_vocab)
    is_open = p.top_k == 0 and p.top_p >= 1 and p.min_p <= 0
    if n_wanted > most or is_open:
        return None
    min_p = float(np.float32(math.log(p.min_p))) if p.min_p > 0 else -math.inf
    is_by_id = p.top_k == 0 and p.top_p >= 1
    return [*penalties, n_last, n_wanted, p.top_k > 0, p.top_p, min_p, p.temperature, is_by_id]


class DeviceSampler:
    """Memory and kernels that draw one token after the other on a device.

    Args:
        n_vocab: logits of a token, those of all ranks.
        own: the ids of those that this rank has; None for all.
        one_shot: to the other ranks that draw the same token; None if there are none. The ids of
            the ranks' slices are then all there are, each once. How often tokens of a slice are in
            the history is counted where the slice is, 4 bytes for each; the window of the penalties
            itself, N_HISTORY tokens, is on every rank.

    Attributes:
        n_rank: how many draw.
        ring: (RING,), int64: what the last steps drew, see `RingEntry`.
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
        assert self._one_shot or len(self._own) == n_vocab, "somebody has the others"
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
        """Return what the kernels read of a sampler's settings; None where the host has to draw."""
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
        if not self._set(self.settings_of(sampler)):
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

    def _count(self, history: TokenHistory, tokens: Sequence[int], never: Sequence[int]) -> None:
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

    def took(self, *, is_first: bool = True) -> None:
        """Note that the host has a token that the device drew: the sampler's next draw is later.

        Args:
            is_first: not so for all but one of the ranks that share the sampler.
        """
        assert self._sampler is not None, "nothing was begun"
        if not self._sampler.is_greedy:
            if is_first:
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
            numbers = self._sampler.uniforms.peek(n_ahead + half)[n_ahead:]
            source = self._host_uniforms.value[first : first + half]
            source.copy_(torch.tensor(numbers, dtype=torch.float64))
            self._uniforms[first : first + half].copy_(source, non_blocking=True)
            self._n_uploaded += half

    def draw(
        self, logits: Tensor | None, token: Tensor, position: Tensor, stream: Tensor | None = None
    ) -> None:
        """Draw a token from logits (n_own,), F32: a step, to be captured.

        Args:
            logits: None on a rank that has none.
            token: (1,), int64, becomes the token that was drawn.
            position: (1,), is raised by one.
            stream: (n_embd,), F32, what the logits were computed from; ranks see whether they had
                the same. Only on ranks with others.
        """
        n_own, settings, found = len(self._own), self._settings, self._found
        launch(
            kernels.survey, (self._n_program,), self._penalised if logits is None else logits,
            self._counts, settings, self._penalised, self._maxima, n_own,
            FACTOR=math.gcd(n_own, 16), BLOCK=self._block, GROUP=self._group,
        )  # fmt: skip
        n_group = min(len(self._maxima), -(-n_own // self._group))
        size, is_checked = power_of_two(n_group), stream is not None and self._one_shot is not None
        launch(
            kernels.bound, (1,), self._maxima, self._maxima if stream is None else stream, settings,
            self._limits, found, n_group, 0 if stream is None else stream.numel(),
            SIZE=size, HAS_STREAM=is_checked, STREAM_BLOCK=STREAM_BLOCK,
            num_warps=16 if size > 2048 else 4,
        )  # fmt: skip
        if self._one_shot is None:
            self._draw_alone(token, position)
        else:
            self._offer(token, is_checked)
            told = self._one_shot.words(self._message.view(torch.int32))
            self._decide(told.view(torch.int64), self._one_shot, token, position)

    def _draw_alone(self, token: Tensor, position: Tensor) -> None:
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
    """The kernels of a draw, to compile them before there is memory: for the target in use.

    Args:
        own: the ids of the logits that the rank has; None for all.
        n_embd: of the stream that ranks compare, if they do.
    """
    meta, starts = torch.device("meta"), list[KernelLaunch]()

    def note(start: KernelLaunch) -> bool:
        starts.append(start)
        return False

    place = torch.empty(1, dtype=torch.int64, device=meta)
    one_shot = OneShotGroups([meta] * n_rank, Ways()).one_shot(0, tuple(range(n_rank)))
    drawer = DeviceSampler(meta, n_vocab, own, one_shot)
    logits = torch.empty(n_vocab if own is None else len(own), device=meta)
    stream = None if n_embd is None else torch.empty(n_embd, device=meta)
    with intercept_launches(note):
        drawer.draw(logits, place, place, stream)
    return starts
