"""One token after the other on a device that feeds itself; the host reads them, a little behind.

A step computes the token that stands in the device's memory, draws the next one and writes it
there. It is captured once and then only replayed. The host enqueues a step or two beyond the token
that it has read, so the device never waits for it; what comes behind the end of an answer is
discarded.

Where a step cannot draw (see `engine.gpu.kernels.sampling`), it and those behind it change nothing,
and the host draws from the logits, which are still there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import EngineError
from engine.gpu.graph import Captured, capture
from engine.gpu.sampling import RING, DeviceSampler, Entry, settings_of
from engine.host_memory import HostTensor

if TYPE_CHECKING:
    from engine.config import SamplingParams
    from engine.sampler import Sampler

Logits: TypeAlias = NDArray[np.float32]

AHEAD = 1
"""Steps beyond the token that the host waits for: one is enough where it is faster than a step."""

CALM = 32
"""Tokens after which steps run ahead again, once the host had to draw."""

POLL_S = 50e-6
"""Between looks at the ring. A look gives way to the threads that paint."""


@dataclass(frozen=True, slots=True)
class TokenStep:
    """How one token is computed, on memory that stays.

    Args:
        token: (1,), int64: what is computed next.
        position: (1,), integers: how many tokens are cached before it.
        begin: writes both, and whatever else depends on the position that the host knows.
        forward: the logits, (n_vocab,) or (1, n_vocab), from nothing but the device's memory.
        can_rewind: computing a token once more, or another instead, does no harm.
    """

    device: torch.device
    n_vocab: int
    token: Tensor
    position: Tensor
    begin: Callable[[int, int], None]
    forward: Callable[[], Tensor]
    can_rewind: bool


class TokenStream:
    """The tokens of one model on one device.

    Args:
        ahead: steps beyond the token that the host waits for.

    Attributes:
        waited_s: see `TokenSource`.

    Raises:
        EngineError: the host's memory cannot be written by the device.
    """

    def __init__(self, step: TokenStep, ahead: int = AHEAD) -> None:
        self._step = step
        self._wanted = min(ahead, RING - 2)
        self._ahead = self._most_ahead = 0
        self._draws = DeviceSampler(step.device, step.n_vocab)
        self._ring = HostTensor((RING,), torch.int64, step.device)
        if step.device.type == "cuda" and not self._ring.is_pinned:
            raise EngineError("The system allows no memory that a GPU can write by itself.")
        self._seen = self._ring.value.numpy()
        self._captured: Captured[Tensor] | None = None
        self._sampler: Sampler | None = None
        self._never: Sequence[int] = ()
        self._is_served = False
        self._next: tuple[int, int] | None = None
        self._n_enqueued = self._n_read = self._n_calm = 0
        self.waited_s = 0.0

    @property
    def n_bytes(self) -> int:
        """Of the device's memory, without what the graph keeps."""
        return self._draws.n_bytes

    def prepare(self, token: int = 0, n_past: int = 0) -> None:
        """Capture the step now, by computing a token twice that is then forgotten.

        Args:
            n_past: cached tokens, which stay; but states that do not go back are others then.

        Raises:
            NotRepeatable: it cannot be captured.
        """
        with torch.inference_mode():
            self.stop()
            self._draws.rest(self._n_enqueued)
            self._step.begin(token, n_past)
            self._compute()
            self._step.begin(token, n_past)  # what is found once in a pass has to be found again
            self._captured = capture(self._step.device, self._compute)
            self._n_read = self._n_enqueued = self._n_enqueued + RING  # no entry is taken for later

    def _compute(self) -> Tensor:
        step = self._step
        logits = step.forward()
        self._draws.draw(logits.view(-1), step.token, step.position)
        self._ring.value.copy_(self._draws.ring, non_blocking=True)
        return logits

    def serve(self, sampler: Sampler, never: Sequence[int]) -> bool:
        """Draw as `sampler` would from now on; False if that has to draw by itself.

        Args:
            never: tokens that must not come; of one sampler always the same.
        """
        if sampler is not self._sampler:
            self.stop()
            self._sampler, self._never = sampler, never
            self._is_served = settings_of(sampler.params, self._step.n_vocab) is not None
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
            EngineError: what the device did is lost.
            RuntimeError: the device failed.
        """
        with torch.inference_mode():
            if self._next != (token, n_past):
                self._begin(token, n_past)
            self._next = None  # until it is known
            self._enqueue(min(1 + self._ahead, n_left))
            entry = self._wait(self._n_read + 1)
            self._n_read += 1
            if not entry.is_drawn:
                return self._logits()
        self._draws.took()
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
        self._wait(self._n_enqueued)
        self._n_read = self._n_enqueued
        return () if following is None or self._step.can_rewind else following[:1]

    def _begin(self, token: int, n_past: int) -> None:
        assert self._sampler is not None, "nobody is served"
        if self._captured is None:
            self.prepare(token, n_past)
        self.stop()
        self._step.begin(token, n_past)
        self._draws.begin(self._sampler, self._never, self._n_enqueued)

    def _enqueue(self, n: int) -> None:
        """Have n steps under way."""
        assert self._captured is not None, "it was captured at the start"
        while self._n_enqueued - self._n_read < n:
            self._draws.supply()
            self._captured.replay()
            self._n_enqueued += 1

    def _wait(self, number: int) -> Entry:
        """What the ring holds of a step, once it is there."""
        begun = time.perf_counter()
        while True:
            is_idle = self._is_idle()  # asked first: what is not there then will never come
            entry = Entry.of(int(self._seen[(number - 1) % RING]))
            if entry.number == number:
                self.waited_s += time.perf_counter() - begun
                return entry
            if is_idle:
                raise EngineError(
                    "The device did not say which token it drew.", "Load the model again."
                )
            time.sleep(POLL_S)

    def _is_idle(self) -> bool:
        """Whether all is done; asking also hands on what Windows has collected."""
        if self._step.device.type != "cuda":
            return True
        stream: Any = torch.cuda.current_stream(self._step.device)
        done: bool = stream.query()
        return done

    def _logits(self) -> Logits | None:
        """Of the step that could not draw; later ones are careful for a while.

        Those behind it have computed the same once more, to other results where states changed.
        """
        assert self._captured is not None, "it was replayed"
        is_lost = self._n_read < self._n_enqueued and not self._step.can_rewind
        self.stop()
        self._ahead = self._n_calm = 0
        if is_lost:
            return None
        logits = self._captured.result.view(-1).to("cpu", torch.float32, copy=True)
        found: Logits = logits.numpy()
        return found
