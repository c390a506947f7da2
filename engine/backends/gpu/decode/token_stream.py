"""Decode loop that runs on the devices: they feed tokens to themselves, and the host reads later.

A step computes the token in device memory, samples the next one and writes it there. It is captured
once and then only replayed. The host enqueues a few steps beyond the token that it has read, so
the device never waits for it; tokens after the end of an answer are discarded. If there are several
ranks, they take each step together, and all sample the same token from the same numbers; the host
reads the ring of one rank.

If a step cannot sample (see `gpu.kernels.sampling`), neither it nor the steps after it change
anything, and the host samples from the logits, which are still available.
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

from engine.backends.gpu.decode.rank_capture import CaptureTask, Recomputed, Replays, capture_on_all
from engine.backends.gpu.decode.sampler_slots import RING
from engine.backends.gpu.decode.sampling import DeviceSampler, RingEntry
from engine.backends.gpu.launch.graph import capture
from engine.decoding.sampling.sampler import Sampler, why_on_host
from engine.errors import CommError, EngineError, Sentence
from engine.hardware.fallbacks import Fallbacks
from engine.hardware.host_memory import HostTensor
from engine.model.forward.batch import FIRST_TOKEN, Piece, Tables
from engine.model.forward.recording import Captured

if TYPE_CHECKING:
    from engine.backends.executor import RankExecutor
    from engine.backends.gpu.comm.one_shot import OneShot, OneShotGroups
    from engine.decoding.sampling.sampler import Logits
    from engine.sampling_params import SamplingParams

AHEAD = 3
"""Number of steps enqueued beyond the token that the host waits for, if states can be rewound; the
host may fall a few tokens behind while a window is painted."""

CALM = 32
"""Number of tokens that the device samples, after the host had to, before steps run ahead again."""

OTHER_SETTINGS = Sentence("Other sampling settings are faster.")
"""Help shown if an answer's settings keep the device from sampling."""

POLL_S = 50e-6  # seconds between polls of the ring; each pause lets the UI threads run


@dataclass(frozen=True, slots=True)
class TokenStep:
    """The step in which one rank computes a token, at fixed addresses.

    Args:
        device: the rank's device.
        n_vocab: number of logits per token, on all ranks together.
        token: (1,), int64: the token to compute.
        position: (1,), integers: number of tokens cached before it.
        begin: writes both, and the sequence's page tables; called with the token and its place.
        forward: computes, from device memory only, this rank's logits (n,) or (1, n), or None if it
            has none; and their hidden state (n_embd,), or None if unknown.
        can_rewind: whether a token may be recomputed, or replaced by another.
        own: token ids of this rank's logits; None for all.
        one_shot: message exchange with the other ranks that sample, or None.
        states: returns the tensors that change when a token at a place is computed, even if it was
            computed before.
        extend: notes that the sequence has been given more pages while steps are in flight.
    """

    device: torch.device
    n_vocab: int
    token: Tensor
    position: Tensor
    begin: Callable[[int, Piece], None]
    forward: Callable[[], tuple[Tensor | None, Tensor | None]]
    can_rewind: bool
    own: range | None = None
    one_shot: OneShot | None = None
    states: Callable[[Piece], Sequence[Tensor]] = lambda piece: ()
    extend: Callable[[Tables], None] = lambda tables: None


class _RankDecoder:
    """One rank's step with its device sampler.

    Args:
        is_read: whether the host reads this rank's ring.

    Raises:
        EngineError: the device cannot write host memory directly.
    """

    def __init__(self, step: TokenStep, *, is_read: bool) -> None:
        self.step = step
        self.sampler = DeviceSampler(step.device, step.n_vocab, step.own, step.one_shot)
        self.ring = HostTensor((RING,), torch.int64, step.device) if is_read else None
        if self.ring and step.device.type == "cuda" and not self.ring.is_pinned:
            raise EngineError("The system does not allow pinned memory that a GPU can write to.")

    def capture_task(self, token: int, piece: Piece, n_step: int) -> CaptureTask:
        """Return a task that captures a step that samples nothing."""

        def begin() -> None:
            self.sampler.pause(n_step)
            self.step.begin(token, piece)

        return CaptureTask(
            begin, self.compute, lambda: capture(self.step.device, self.compute),
            self.step.states(piece),
        )  # fmt: skip

    def compute(self) -> Tensor | None:
        """Take a step: compute, sample and copy the ring; return this rank's logits."""
        step = self.step
        logits, hidden = step.forward()
        own = None if logits is None else logits.view(-1)
        self.sampler.sample(own, step.token, step.position, hidden)
        if self.ring is not None:
            self.ring.value.copy_(self.sampler.ring, non_blocking=True)
        return own


class TokenStream:
    """One model's tokens, sampled on its ranks' devices.

    Args:
        steps: each rank's step; None for ranks that have no part of the model.
        one_shots: the ranks' one-shot all-reduces, if kernels use them.
        on_failure: called with an error before it is raised, after which the stream is unusable;
            may raise a different error.
        ahead: steps to enqueue beyond the token that the host waits for.

    Attributes:
        waited_s: see `TokenSource`.

    Raises:
        EngineError: a device cannot write host memory directly.
    """

    def __init__(
        self, steps: Sequence[TokenStep | None], executor: RankExecutor,
        one_shots: OneShotGroups | None = None,
        on_failure: Callable[[Exception], None] = lambda error: None, ahead: int = AHEAD,
        fallbacks: Fallbacks | None = None,
    ) -> None:  # fmt: skip
        self._fallbacks = Fallbacks() if fallbacks is None else fallbacks
        self._executor, self._one_shots, self._on_failure = executor, one_shots, on_failure
        self._wanted = min(ahead, RING - 2)
        self._ahead = self._most_ahead = 0
        self._read = next(rank for rank in executor.ranks if steps[rank] is not None)
        self._all = executor.run(lambda rank: self._decoder(rank, steps[rank]))
        self._decoders = [decoder for decoder in self._all if decoder is not None]
        reader = self._decoders[0]
        assert reader.ring is not None, "the host reads this rank's ring"
        self._step, self._device_sampler, self._ring = reader.step, reader.sampler, reader.ring
        self._seen = self._ring.value.numpy()
        self._replays: Replays | None = None
        self._sampler: Sampler | None = None
        self._never: Sequence[int] = ()
        self._is_served = False
        self._next: tuple[int, int] | None = None
        self._n_enqueued = self._n_read = self._n_calm = 0
        self.waited_s = 0.0

    def _decoder(self, rank: int, step: TokenStep | None) -> _RankDecoder | None:
        return None if step is None else _RankDecoder(step, is_read=rank == self._read)

    def prepare(self, token: int = 0, piece: Piece = FIRST_TOKEN) -> None:
        """Capture the step now, by computing a token that is then dropped.

        Args:
            token: the token to compute.
            piece: its place; its keys and values stay cached there, but states are restored.

        Raises:
            NotRepeatable: the step cannot be captured.
        """
        self.stop()
        tasks = [
            _nothing() if decoder is None else decoder.capture_task(token, piece, self._n_enqueued)
            for decoder in self._all
        ]
        kept = self._executor.run(lambda rank: [state.clone() for state in tasks[rank].states])
        self._replays, _ = capture_on_all(self._executor, tasks, self._one_shots)

        def restore(rank: int) -> None:
            for state, before in zip(tasks[rank].states, kept[rank], strict=True):
                state.copy_(before)

        self._executor.run(restore)
        self._n_read = self._n_enqueued = self._n_enqueued + RING  # skips old entries

    def serve(self, sampler: Sampler, never: Sequence[int]) -> bool:
        """Sample like `sampler` from now on; return False if the host must sample.

        `never` lists banned tokens; it is always the same for a given sampler.
        """
        if sampler is not self._sampler:
            self.stop()
            self._sampler, self._never = sampler, never
            self._is_served = self._note_service(sampler)
            self._ahead = self._most_ahead = self._steps_ahead(sampler.params)
        return self._is_served

    def _note_service(self, sampler: Sampler) -> bool:
        """Return whether the devices can sample like `sampler`; report a fallback if they
        cannot."""
        self._fallbacks.withdraw("sampling")
        why = why_on_host(sampler, self._step.n_vocab, self._device_sampler.n_rank)
        if why:
            names = [str(decoder.step.device) for decoder in self._decoders]
            self._fallbacks.report("sampling", names, why, OTHER_SETTINGS)
        return not why

    def _steps_ahead(self, params: SamplingParams) -> int:
        """Return how many steps to run ahead.

        If states cannot be rewound, this is at most one, and only if the device is sure to sample:
        the states then include at most one token too many, the last one read. Usually that token
        ended the answer, and the chat template continues with it; otherwise states are restored
        from a checkpoint.
        """
        if self._step.can_rewind:
            return self._wanted
        is_sure = params.temperature <= 0 or params.top_k > 0
        return min(1, self._wanted) if is_sure else 0

    def next(self, token: int, piece: Piece, n_left: int) -> int | Logits | None:
        """Compute a token, and sample the next one.

        This consumes the sampler's random number; the caller makes the sampler accept the token.

        Args:
            token: the token to compute.
            piece: its place; see `PagedTokenSource`.
            n_left: number of tokens that may still be sampled, including this one.

        Returns:
            The sampled token; or the logits (n_vocab,), from which the host must sample; or None if
            the states have advanced beyond these logits and cannot be rewound.

        Raises:
            EngineError: the devices' work is lost.
            RuntimeError: a device failed.
        """
        with self._failing():
            if self._next != (token, piece.n_past):
                self._begin(token, piece)
            else:
                self._each(lambda decoder: decoder.step.extend(piece.tables))
            self._next = None  # until the token is known
            self._enqueue(min(1 + self._ahead, n_left))
            entry = self._wait(self._n_read + 1)
            self._n_read += 1
            if not entry.is_sampled:
                return self._logits()
        for decoder in self._decoders:
            decoder.sampler.advance(is_first=decoder.sampler is self._device_sampler)
        self._n_calm += 1
        if self._n_calm >= CALM:
            self._ahead = self._most_ahead
        self._next = (entry.token, piece.stop)
        return entry.token

    @property
    def is_beyond(self) -> bool:
        """Whether states include the last token read; see `TokenSource`."""
        return self._n_read < self._n_enqueued and not self._step.can_rewind

    def hold(self, n: int) -> bool:
        """Do not run ahead for the next n tokens; return whether no step is in flight."""
        self._ahead, self._n_calm = 0, CALM - n
        if self._n_read < self._n_enqueued:
            return False
        self._next = None  # the token's memory may be overwritten
        return True

    def stop(self) -> Sequence[int]:
        """Wait for all enqueued steps and discard them; call before any other use of the cache.

        Returns:
            The last token read, if the states already include it and cannot be rewound.

        Raises:
            EngineError, RuntimeError: see `next`.
        """
        following, self._next = self._next, None
        if self._n_read == self._n_enqueued:
            return ()
        with self._failing():
            self._wait(self._n_enqueued)
            self._executor.wait()  # the host may next use other ranks' memory without synchronising
        self._n_read = self._n_enqueued
        return () if following is None or self._step.can_rewind else following[:1]

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._n_read = self._n_enqueued  # stop waiting for steps
            on_failure, self._on_failure = self._on_failure, lambda error: None
            on_failure(error)
            raise

    def _begin(self, token: int, piece: Piece) -> None:
        assert self._sampler is not None, "no sampler was set by `serve`"
        if self._replays is None:
            self.prepare(token, piece)
        self.stop()
        sampler, never, n_step = self._sampler, self._never, self._n_enqueued

        def begin(decoder: _RankDecoder) -> None:
            decoder.step.begin(token, piece)
            decoder.sampler.begin(sampler, never, n_step)

        self._each(begin)

    def _each(self, do: Callable[[_RankDecoder], None]) -> None:
        decoders = self._all
        self._executor.call_inline(
            lambda rank: None if (decoder := decoders[rank]) is None else do(decoder)
        )

    def _enqueue(self, n: int) -> None:
        assert self._replays is not None, "the step was captured at the start"
        while self._n_enqueued - self._n_read < n:
            self._each(lambda decoder: decoder.sampler.upload_uniforms())
            self._replays.replay()
            self._n_enqueued += 1

    def _wait(self, number: int) -> RingEntry:
        """Wait for a step's entry in the ring, and return it.

        Raises:
            CommError: see `_check`; or a device makes no progress.
            EngineError: the step has finished without an entry.
        """
        begun = time.perf_counter()
        while True:
            is_idle = self._is_idle()  # before reading: an entry missing after that never comes
            entry = RingEntry.of(int(self._seen[(number - 1) % RING]))
            if entry.number == number:
                self.waited_s += time.perf_counter() - begun
                self._check(entry)
                return entry
            if is_idle:
                self._check(None)
                raise EngineError(
                    "The device did not report the token it sampled.", "Load the model again."
                )
            self._executor.check(self._read, begun)
            time.sleep(POLL_S)

    def _is_idle(self) -> bool:
        """Return whether all work is done; the query also submits work that Windows batches."""
        return self._executor.is_idle(self._read)

    def _check(self, entry: RingEntry | None) -> None:
        """Raise a CommError if a kernel timed out waiting for a rank, or if ranks disagree."""
        problem = None if self._one_shots is None else self._one_shots.problem()
        if entry is not None and entry.wrong and self._step.one_shot is not None:
            ranks = [self._step.one_shot.group[seat] for seat in entry.wrong]
            device = str(self._executor.devices[ranks[0]])
            what = Sentence("has computed different numbers from the others")
            problem = problem or CommError(ranks[0], what, device)
        if problem is not None:
            raise problem

    def _logits(self) -> Logits | None:
        """Return the logits of the step that could not sample, and stop running ahead for a while.

        Later steps have recomputed the same token, with different results if states have changed;
        in that case the logits are lost, and the result is None.
        """
        is_lost = self.is_beyond
        self.stop()
        self._ahead = self._n_calm = 0
        if is_lost:
            return None
        whole = np.empty(self._step.n_vocab, np.float32)
        assert self._replays is not None, "the step was replayed"
        parts = self._replays.parts

        def fetch(rank: int) -> None:
            decoder, logits = self._all[rank], parts[rank].result
            if decoder is not None and logits is not None:
                own = decoder.step.own or range(len(whole))
                whole[own.start : own.stop] = logits.cpu().numpy()

        self._executor.call_inline(fetch)
        return whole


def _nothing() -> CaptureTask:

    def captured() -> Captured[Tensor | None]:
        return Recomputed(lambda: None, is_idle=True)

    return CaptureTask(lambda: None, lambda: None, captured)
