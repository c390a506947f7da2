"""One token after the other on devices that feed themselves; the host reads them, a little behind.

A step computes the token that stands in the device's memory, draws the next one and writes it
there. It is captured once and then only replayed. The host enqueues a step or two beyond the token
that it has read, so the device never waits for it; what comes behind the end of an answer is
discarded. Several ranks take a step together, and draw the same token each, from the same numbers;
the host reads what one of them wrote.

Where a step cannot draw (see `engine.gpu.kernels.sampling`), it and those behind it change nothing,
and the host draws from the logits, which are still there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.errors import CommError, EngineError
from engine.gpu.decode.rank_capture import Recomputed, Replays, Take, capture_on_all
from engine.gpu.decode.sampling import RING, DeviceSampler, RingEntry, WordExchange
from engine.gpu.launch.graph import Captured, capture
from engine.hardware.host_memory import HostTensor

if TYPE_CHECKING:
    from engine.config import SamplingParams
    from engine.gpu.decode.rank_capture import OneShotControl
    from engine.parallel.executor import Crew
    from engine.sampling.token_source import Logits
from engine.sampling.sampler import Sampler

AHEAD = 1
"""Steps beyond the token that the host waits for: one is enough where it is faster than a step."""

CALM = 32
"""Tokens after which steps run ahead again, once the host had to draw."""

POLL_S = 50e-6
"""Between looks at the ring. A look gives way to the threads that paint."""


@dataclass(frozen=True, slots=True)
class TokenStep:
    """How one token is computed on one rank, on memory that stays.

    Args:
        token: (1,), int64: what is computed next.
        position: (1,), integers: how many tokens are cached before it.
        begin: writes both, and whatever else depends on the position that the host knows.
        forward: this rank's logits, (n,) or (1, n), None if it has none; and what they were
            computed from, (n_embd,), None if that is not known. From nothing but the device's
            memory.
        can_rewind: computing a token once more, or another instead, does no harm.
        own: the ids whose logits this rank has; None for all.
        one_shot: to the other ranks that draw; None if there are none.
        states: what computing changes, also of a token that was computed before.
    """

    device: torch.device
    n_vocab: int
    token: Tensor
    position: Tensor
    begin: Callable[[int, int], None]
    forward: Callable[[], tuple[Tensor | None, Tensor | None]]
    can_rewind: bool
    own: range | None = None
    one_shot: WordExchange | None = None
    states: Sequence[Tensor] = ()


class _Seat:
    """One rank's part of a stream.

    Args:
        is_read: by the host, to see what was drawn.

    Raises:
        EngineError: the host's memory cannot be written by the device.
    """

    def __init__(self, step: TokenStep, *, is_read: bool) -> None:
        self.step = step
        self.draws = DeviceSampler(step.device, step.n_vocab, step.own, step.one_shot)
        self.ring = HostTensor((RING,), torch.int64, step.device) if is_read else None
        if self.ring and step.device.type == "cuda" and not self.ring.is_pinned:
            raise EngineError("The system allows no memory that a GPU can write by itself.")

    def take(self, token: int, n_past: int, n_step: int) -> Take:
        """What is to be captured, as a step that draws nothing."""

        def begin() -> None:
            self.draws.rest(n_step)
            self.step.begin(token, n_past)

        return Take(
            begin, self.compute, lambda: capture(self.step.device, self.compute), self.step.states
        )

    def compute(self) -> Tensor | None:
        """A step; returns this rank's logits."""
        step = self.step
        logits, stream = step.forward()
        own = None if logits is None else logits.view(-1)
        self.draws.draw(own, step.token, step.position, stream)
        if self.ring is not None:
            self.ring.value.copy_(self.draws.ring, non_blocking=True)
        return own


class TokenStream:
    """The tokens of one model, drawn on the devices of its ranks.

    Args:
        steps: of each rank; None for those that have no part of the model.
        one_shots: the one-shot all-reduces in which kernels of the ranks meet, if they do.
        on_failure: called before an error is raised, behind which it is of no use any more.
        ahead: steps beyond the token that the host waits for.

    Attributes:
        waited_s: see `TokenSource`.

    Raises:
        EngineError: the host's memory cannot be written by a device.
    """

    def __init__(
        self, steps: Sequence[TokenStep | None], crew: Crew,
        one_shots: OneShotControl | None = None,
        on_failure: Callable[[], None] = lambda: None, ahead: int = AHEAD,
    ) -> None:  # fmt: skip
        self._crew, self._one_shots, self._on_failure = crew, one_shots, on_failure
        self._wanted = min(ahead, RING - 2)
        self._ahead = self._most_ahead = 0
        self._read = next(rank for rank in crew.ranks if steps[rank] is not None)
        self._all = crew.run(lambda rank: self._seat(rank, steps[rank]))
        self._seats = [seat for seat in self._all if seat is not None]
        reader = self._seats[0]
        assert reader.ring is not None, "it is the one that is read"
        self._step, self._draws, self._ring = reader.step, reader.draws, reader.ring
        self._seen = self._ring.value.numpy()
        self._replays: Replays | None = None
        self._sampler: Sampler | None = None
        self._never: Sequence[int] = ()
        self._is_served = False
        self._next: tuple[int, int] | None = None
        self._n_enqueued = self._n_read = self._n_calm = 0
        self.waited_s = 0.0

    def _seat(self, rank: int, step: TokenStep | None) -> _Seat | None:
        return None if step is None else _Seat(step, is_read=rank == self._read)

    def prepare(self, token: int = 0, n_past: int = 0) -> None:
        """Capture the step now, by computing a token that is then forgotten.

        Args:
            n_past: cached tokens, which stay, as states do.

        Raises:
            NotRepeatable: it cannot be captured.
        """
        self.stop()
        takes = [
            _nothing() if seat is None else seat.take(token, n_past, self._n_enqueued)
            for seat in self._all
        ]
        self._replays, _ = capture_on_all(self._crew, takes, self._one_shots)
        self._n_read = self._n_enqueued = self._n_enqueued + RING  # no entry is taken for later

    def serve(self, sampler: Sampler, never: Sequence[int]) -> bool:
        """Draw as `sampler` would from now on; False if that has to draw by itself.

        Args:
            never: tokens that must not come; of one sampler always the same.
        """
        if sampler is not self._sampler:
            self.stop()
            self._sampler, self._never = sampler, never
            self._is_served = self._draws.settings_of(sampler) is not None
            self._ahead = self._most_ahead = self._steps_ahead(sampler.params)
        return self._is_served

    def _steps_ahead(self, params: SamplingParams) -> int:
        """How far steps run ahead.

        Where states do not go back, only one does, if it can draw: then what the states hold too
        much is the last token that was read. Most often it is the one that ended the answer, which
        the chat's template continues with; else the states go back to where they were saved.
        """
        if self._step.can_rewind:
            return self._wanted
        is_sure = params.temperature <= 0 or params.top_k > 0
        return min(1, self._wanted) if is_sure else 0

    def next(self, token: int, n_past: int, n_left: int) -> int | Logits | None:
        """Compute a token after `n_past` cached ones, and draw the one behind it.

        The sampler's random numbers are taken here; who calls this lets it accept what was drawn.

        Args:
            n_left: how many more may be drawn, with this one.

        Returns:
            The token that was drawn; or the logits (n_vocab,), from which the host has to draw; or
            None if a state cannot go back to those.

        Raises:
            EngineError: what the devices did is lost.
            RuntimeError: a device failed.
        """
        with self._failing():
            if self._next != (token, n_past):
                self._begin(token, n_past)
            self._next = None  # until it is known
            self._enqueue(min(1 + self._ahead, n_left))
            entry = self._wait(self._n_read + 1)
            self._n_read += 1
            if not entry.is_sampled:
                return self._logits()
        for seat in self._seats:
            seat.draws.took(is_first=seat.draws is self._draws)
        self._n_calm += 1
        if self._n_calm >= CALM:
            self._ahead = self._most_ahead
        self._next = (entry.token, n_past + 1)
        return entry.token

    def stop(self) -> Sequence[int]:
        """Wait for what was enqueued; nothing of it counts. Before anything else uses the cache.

        Returns:
            What states hold of it, which do not go back.

        Raises:
            EngineError, RuntimeError: see `next`.
        """
        following, self._next = self._next, None
        if self._n_read == self._n_enqueued:
            return ()
        with self._failing():
            self._wait(self._n_enqueued)
            self._crew.wait()  # what the host does next with another rank's memory is in no stream
        self._n_read = self._n_enqueued
        return () if following is None or self._step.can_rewind else following[:1]

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Tell of a failure, once."""
        try:
            yield
        except Exception:
            self._n_read = self._n_enqueued  # nobody waits for that any more
            on_failure, self._on_failure = self._on_failure, lambda: None
            on_failure()
            raise

    def _begin(self, token: int, n_past: int) -> None:
        assert self._sampler is not None, "nobody is served"
        if self._replays is None:
            self.prepare(token, n_past)
        self.stop()
        sampler, never, n_step = self._sampler, self._never, self._n_enqueued

        def begin(seat: _Seat) -> None:
            seat.step.begin(token, n_past)
            seat.draws.begin(sampler, never, n_step)

        self._each(begin)

    def _each(self, do: Callable[[_Seat], None]) -> None:
        """Do something for each rank that has a part of the model, on this thread."""
        seats = self._all
        self._crew.here(lambda rank: None if (seat := seats[rank]) is None else do(seat))

    def _enqueue(self, n: int) -> None:
        """Have n steps under way."""
        assert self._replays is not None, "it was captured at the start"
        while self._n_enqueued - self._n_read < n:
            self._each(lambda seat: seat.draws.supply())
            self._replays.replay()
            self._n_enqueued += 1

    def _wait(self, number: int) -> RingEntry:
        """What the ring holds of a step, once it is there.

        Raises:
            CommError: ranks have not met as they should, or do not come to an end.
            EngineError: the step has come to an end without an entry.
        """
        begun = time.perf_counter()
        while True:
            is_idle = self._is_idle()  # asked first: what is not there then will never come
            entry = RingEntry.of(int(self._seen[(number - 1) % RING]))
            if entry.number == number:
                self.waited_s += time.perf_counter() - begun
                self._check(entry)
                return entry
            if is_idle:
                self._check(None)
                raise EngineError(
                    "The device did not say which token it drew.", "Load the model again."
                )
            self._crew.check(self._read, begun)
            time.sleep(POLL_S)

    def _is_idle(self) -> bool:
        """Whether all is done; asking also hands on what Windows has collected."""
        return self._crew.is_idle(self._read)

    def _check(self, entry: RingEntry | None) -> None:
        """Raises:
        CommError: a kernel waited in vain, or ranks have computed something else than others.
        """
        problem = None if self._one_shots is None else self._one_shots.problem()
        if entry is not None and entry.wrong and self._step.one_shot is not None:
            ranks = [self._step.one_shot.group[seat] for seat in entry.wrong]
            device = str(self._crew.devices[ranks[0]])
            problem = problem or CommError(ranks[0], "has computed other numbers", device)
        if problem is not None:
            raise problem

    def _logits(self) -> Logits | None:
        """Of the step that could not draw; later ones are careful for a while.

        Those behind it have computed the same once more, to other results where states changed.
        """
        is_lost = self._n_read < self._n_enqueued and not self._step.can_rewind
        self.stop()
        self._ahead = self._n_calm = 0
        if is_lost:
            return None
        whole = np.empty(self._step.n_vocab, np.float32)
        assert self._replays is not None, "it was replayed"
        parts = self._replays.parts

        def fetch(rank: int) -> None:
            seat, logits = self._all[rank], parts[rank].result
            if seat is not None and logits is not None:
                own = seat.step.own or range(len(whole))
                whole[own.start : own.stop] = logits.cpu().numpy()

        self._crew.here(fetch)
        return whole


def _nothing() -> Take:
    """Of a rank that has no part of the model."""

    def captured() -> Captured[Tensor | None]:
        return Recomputed(lambda: None, is_idle=True)

    return Take(lambda: None, lambda: None, captured)
