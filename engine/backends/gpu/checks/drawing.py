"""Check of sampling on the device: tokens drawn from random logits, as the host draws them.

Ranks with slices of the vocabulary are all played by one device: their messages are collected in
a first round, in which nothing that is drawn counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.backends.gpu.checks.comparison import EXACT, Pair
from engine.backends.gpu.decode.sampling import DeviceSampler, RingEntry, WordExchange
from engine.backends.gpu.launch.refusals import allows
from engine.decoding.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLING = "sampling"
"""Name of the kernels, by which they may be refused."""

SETTINGS = (
    SamplingParams(temperature=0, repeat_penalty=1),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1),
    SamplingParams(temperature=1.2, top_k=0, top_p=0.7, min_p=0.02, seed=2),
    SamplingParams(
        temperature=0.9, top_k=20, top_p=1, min_p=0, seed=3, repeat_last_n=16,
        repeat_penalty=1.3, frequency_penalty=0.15, presence_penalty=0.4,
    ),
)  # fmt: skip
"""Settings that each use other steps: the most likely token; all limits; no top-k; penalties."""

HISTORY = 16
"""Tokens before the first that is drawn; they are among the most likely."""

SPREAD = 3.0
"""Standard deviation of the logits."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """What ranks draw tokens from.

    Attributes:
        n_vocab: number of tokens of the vocabulary.
        slices: ids of each rank's logits.
        n_embd: size of the hidden state that the ranks compare.
    """

    n_vocab: int
    slices: tuple[range, ...]
    n_embd: int

    @property
    def name(self) -> str:
        """Text that tells the kernels' variants and numbers of programs from others."""
        widths = "+".join(str(len(own)) for own in self.slices)
        return f"{SAMPLING} {widths} of {self.n_vocab}, {self.n_embd}"


def drawn_tokens(drawing: Drawing, device: torch.device) -> list[Pair]:
    """Draw tokens on a device and on the host; return the two rows of ids."""
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
    """Return the token that all ranks draw; -1 where one does not, or they differ."""
    n_rank = len(drawing.slices)
    group = tuple(range(n_rank))
    messages: list[Tensor | None] = [None] * n_rank
    hidden = torch.ones(drawing.n_embd, device=device)
    tokens: set[int] = set()
    for _ in range(1 if n_rank == 1 else 2):
        tokens.clear()
        for seat, own in enumerate(drawing.slices):
            exchange: WordExchange = _Collected(seat, group, messages)
            sampler = DeviceSampler(device, drawing.n_vocab, own, exchange)
            if not sampler.begin(make(), (), 0):
                return -1
            token = torch.zeros(1, dtype=torch.int64, device=device)
            mine = torch.from_numpy(logits[own.start : own.stop]).to(device) if own else None
            sampler.sample(mine, token, torch.zeros_like(token), hidden)
            entry = RingEntry.of(int(sampler.ring[0]))
            tokens.add(entry.token if entry.is_sampled and entry.token == int(token) else -1)
    return tokens.pop() if len(tokens) == 1 else -1


class _Collected:
    """Exchange of messages between ranks that one device plays, one after the other."""

    def __init__(self, seat: int, group: tuple[int, ...], messages: list[Tensor | None]) -> None:
        self.seat, self.group, self._messages = seat, group, messages

    def words(self, own: Tensor) -> Tensor:
        """Return the messages of all, with the own one in place of those that are missing."""
        self._messages[self.seat] = own.clone()
        return torch.stack([own if m is None else m for m in self._messages])
