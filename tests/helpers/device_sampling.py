"""Tokens sampled by kernels on one or several ranks, compared with a sampler of the host."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.backends.gpu.comm.one_shot import OneShot
from engine.backends.gpu.decode.sampler_slots import RING
from engine.backends.gpu.decode.sampling import DeviceSampler, RingEntry
from engine.backends.gpu.launch.graph import capture
from engine.decoding.sampling.sampler import Sampler
from engine.model.forward.recording import Captured
from engine.sampling_params import SamplingParams

T = TypeVar("T")

NEUTRAL = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, seed=1)
GREEDY = SamplingParams(temperature=0)
PENALTIES = {"repeat_penalty": 1.3, "frequency_penalty": 0.15, "presence_penalty": 0.4}


class HostExchanges:
    """Message exchange between ranks on the host; each rank has a thread of its own."""

    def __init__(self, n_rank: int) -> None:
        self.barrier = threading.Barrier(n_rank, timeout=60)
        self.shown: list[Tensor] = [torch.empty(0)] * n_rank
        self.n_rank = n_rank

    def one_shot(self, seat: int) -> HostExchange:
        return HostExchange(self, seat)


class HostExchange:
    """One rank's end of a `HostExchanges`.

    Attributes:
        n_bytes: bytes that it has sent to each other rank so far.
    """

    def __init__(self, one_shots: HostExchanges, seat: int) -> None:
        self._one_shots, self.seat = one_shots, seat
        self.group = tuple(range(one_shots.n_rank))
        self.n_bytes = 0

    def words(self, own: Tensor) -> Tensor:
        assert own.dtype == torch.int32
        self.n_bytes += own.nbytes
        self._one_shots.shown[self.seat] = own.cpu().clone()
        self._one_shots.barrier.wait()
        found = torch.stack(self._one_shots.shown).to(own.device)
        self._one_shots.barrier.wait()
        return found


class SamplerPair:
    """A host sampler and ranks on a device that must sample the same tokens.

    Args:
        cuts: boundaries of the ranks' slices of the vocabulary, if there are several ranks.
        one_shots: the ends by which they exchange messages, if not on the host.
    """

    def __init__(
        self, device: str, params: SamplingParams, n_vocab: int, prompt: Sequence[int] = (),
        never: Sequence[int] = (), n_step: int = 0, cuts: Sequence[int] = (),
        one_shots: Sequence[OneShot] = (),
    ) -> None:  # fmt: skip
        self.host, self.followed = Sampler(params), Sampler(params)
        place = torch.device(device)
        self.slices = [range(*ends) for ends in pairwise(cuts)] or [range(n_vocab)]
        on_host = HostExchanges(len(self.slices))
        self.one_shots = one_shots or [on_host.one_shot(n) for n in range(len(self.slices))]
        self.samplers = [DeviceSampler(place, n_vocab)]
        if cuts:
            self.samplers = [
                DeviceSampler(place, n_vocab, own, one_shot)
                for own, one_shot in zip(self.slices, self.one_shots, strict=True)
            ]
        self._threads = ThreadPoolExecutor(len(self.slices))
        self.never = list(never)
        self.tokens = [torch.zeros(1, dtype=torch.int64, device=place) for _ in self.slices]
        self.positions = [torch.zeros(1, dtype=torch.int64, device=place) for _ in self.slices]
        self.hidden_states: list[Tensor | None] = [None for _ in self.slices]
        self.n_step = n_step
        self._captures: list[Captured[None]] = []
        for token in prompt:
            self.accept(token)
        self.begin()

    @property
    def token(self) -> int:
        """Token that the next step computes, the same on all ranks."""
        return self._same([int(x) for x in self.tokens])

    @property
    def position(self) -> int:
        return self._same([int(x) for x in self.positions])

    @staticmethod
    def _same(values: Sequence[int]) -> int:
        assert len(set(values)) == 1
        return values[0]

    def begin(self) -> None:
        for device_sampler in self.samplers:
            assert device_sampler.begin(self.followed, self.never, self.n_step)

    def accept(self, token: int) -> None:
        self.host.accept(token)
        self.followed.accept(token)

    def step(self, logits: np.ndarray) -> RingEntry:
        """Take a step from logits; return its ring entry, the same on all ranks."""
        for device_sampler in self.samplers:
            device_sampler.upload_uniforms()
        self.n_step += 1
        entries = set(self.on_all(lambda n: self.step_of(n, logits)))
        assert len(entries) == 1
        entry = entries.pop()
        assert entry.number == self.n_step
        return entry

    def on_all(self, do: Callable[[int], T]) -> list[T]:
        """Call a function for all ranks, each on its thread; return their results."""
        return list(self._threads.map(do, range(len(self.slices))))

    def step_of(self, n: int, logits: np.ndarray) -> RingEntry:
        """Take one rank's part of a step."""
        own, place = self.slices[n], self.tokens[n].device
        slice_ = torch.from_numpy(logits[own.start : own.stop]).to(place)
        if self._captures:
            self._logits[n].copy_(slice_)
            self._captures[n].replay()
        else:
            places = self.tokens[n], self.positions[n], self.hidden_states[n]
            self.samplers[n].sample(slice_ if own else None, *places)
        return RingEntry.of(int(self.samplers[n].ring[(self.n_step - 1) % RING]))

    def capture(self) -> None:
        """Capture a step, and replay it from now on."""

        def captured(n: int) -> Captured[None]:
            device_sampler, logits = self.samplers[n], self._logits[n]
            places = self.tokens[n], self.positions[n], self.hidden_states[n]
            device_sampler.sample(logits, *places)
            return capture(logits.device, lambda: device_sampler.sample(logits, *places))

        self._logits = [torch.zeros(len(own), device=self.tokens[0].device) for own in self.slices]
        for device_sampler in self.samplers:
            device_sampler.pause(self.n_step)
        self._captures = self.on_all(captured)
        self.begin()

    def sample(self, logits: np.ndarray) -> bool:
        """Sample on device and host, and accept the token; return whether the device could."""
        place, masked = self.position, self.masked(logits)
        entry = self.step(logits)
        token = self.host.sample(masked)
        if entry.is_sampled:
            assert entry.token == self.token == token
            assert self.position == place + 1
            for n, device_sampler in enumerate(self.samplers):
                device_sampler.advance(is_first=n == 0)
            self.accept(token)
            return True
        assert self.followed.sample(masked) == token
        self.accept(token)
        self.begin()
        return False

    def sampled(self, logits: np.ndarray) -> int:
        """Sample a token where the device must be able to, and return it."""
        assert self.sample(logits)
        return self.token

    def masked(self, logits: np.ndarray) -> np.ndarray:
        masked = logits.copy()
        masked[self.never] = -math.inf
        return masked


def random_params(random: np.random.Generator) -> SamplingParams:
    """Return random settings that the device supports, of every kind."""
    kind = random.integers(5)
    top_k = int(random.integers(1, 120)) if kind < 3 else 0
    top_p = float(random.choice([1.0, 0.95, 0.8, 0.3, 0.0]))
    min_p = float(random.choice([0.0, 0.02, 0.3, 1.0]))
    if kind == 3:
        top_p = min(top_p, 0.8)
    elif kind == 4:
        min_p = max(min_p, 0.02)
    penalties = PENALTIES if random.integers(2) else {}
    return SamplingParams(
        seed=int(random.integers(1000)), temperature=float(random.choice([0, 0.4, 1, 1.7])),
        top_k=top_k, top_p=top_p, min_p=min_p, repeat_last_n=int(random.choice([-1, 0, 3, 20])),
        **penalties,
    )  # fmt: skip


def random_logits(random: np.random.Generator, n: int) -> np.ndarray:
    """Return random logits: steep or flat, some with many equal ones or impossible tokens."""
    logits = (random.standard_normal(n) * random.choice([1, 3, 8])).astype(np.float32)
    kind = random.integers(4)
    if kind == 0:
        logits = np.round(logits)
    elif kind == 1:
        logits[random.random(n) < 0.7] = -math.inf
        logits[random.integers(n)] = 1
    return logits
