"""Forward passes on all ranks of a model: batches of tokens, and single tokens, which replay."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from torch import Tensor

from engine.errors import EngineError
from engine.hardware.backend_choice import captures_tokens
from engine.hardware.fallbacks import Fallbacks
from engine.hardware.faults import call_all, stopped_error
from engine.model.forward.batch import (
    FIRST_TOKEN,
    MOST_AT_ONCE,
    SMALL_BATCH,
    Batch,
    PassSize,
    Piece,
)
from engine.runtime.interface import page_groups
from engine.runtime.memory import CacheMemory
from engine.runtime.passes.guessing import GuessPasses
from engine.runtime.passes.prompt_batches import PromptBatches
from engine.runtime.passes.row_sampling import RowSampling
from engine.runtime.rank import Rank, Replay, token_steps
from engine.runtime.recording import (
    OneShotUse,
    RecordedSizes,
    are_captured,
    captured_on,
    may_repeat,
    padded,
    repeated_on,
    size_of,
    warm_up,
)

if TYPE_CHECKING:
    from engine.backends.executor import RankExecutor
    from engine.backends.gpu.comm.one_shot import OneShotGroups
    from engine.backends.gpu.decode.rank_capture import CaptureTask
    from engine.decoding.sampling.sampler import Logits, SamplingWish
    from engine.model.forward.pages import Sight
    from engine.model.forward.state import CacheSize
    from engine.runtime.interface import Guard, TokenSource

T = TypeVar("T")

log = logging.getLogger(__name__)

NO_CANDIDATES = "its kernels cannot compare the likeliest tokens of all devices"
"""Reason for sampling on the host where ranks have no kernels that meet."""


class ModelRunner(CacheMemory, GuessPasses):
    """Runner of forward passes on all ranks of one model.

    Every single token takes the same operations, so one is recorded and then replayed: as native
    calls if all ranks use the CPU's kernels (`cpu.recorder`), else as CUDA graphs on the
    ranks with GPUs, in several parts if the hosts make the collectives
    (`engine.backends.gpu.decode.rank_capture`).

    Args:
        executor: executor of the ranks.
        n_vocab: number of tokens of the vocabulary.
        size: sizes of the cache, and with them of the context and of batches.
        sights: how far back each group of layers sees.
        can_rewind: whether the cache can drop its last tokens.
        guard: returns the contexts of calls on the ranks.
        fallbacks: list of what makes the GPUs slower.

    Attributes:
        batches: batches of prompts.
        token_source: samples tokens where they are computed; None if the host samples all.
        meeting: use of the one-shot all-reduces of the ranks' kernels.
        groups: see `PagedRuntime`.
        n_slots: number of places for the recurrent states of sequences.
        n_single: number of passes over single tokens since the recordings were last dropped, by
            their size.
    """

    def __init__(
        self, executor: RankExecutor, n_vocab: int, size: CacheSize, sights: Sequence[Sight], *,
        can_rewind: bool,
        guard: Guard = lambda doing, n_tokens: nullcontext(), fallbacks: Fallbacks | None = None,
    ) -> None:  # fmt: skip
        self.ranks: list[Rank] = []
        self.token_source: TokenSource | None = None
        one_shots = getattr(executor.group, "one_shots", None)
        self.meeting = OneShotUse(one_shots, has_gpus=executor.has_gpus)
        self._sizes = RecordedSizes()
        self.n_single = self._sizes.n_single
        self.executor = executor
        self.n_vocab, self.n_ctx, self.n_batch = n_vocab, size.n_ctx, size.n_batch
        self.groups = page_groups(size, sights)
        self.n_slots = size.n_slots
        self.can_rewind = can_rewind
        self._guard = guard
        self.fallbacks = Fallbacks() if fallbacks is None else fallbacks
        self.batches = PromptBatches(executor)
        self._row_sampling: RowSampling | None = None

    @property
    def one_shots(self) -> OneShotGroups | None:
        """One-shot all-reduces of the ranks' kernels; None if there are none, or retired."""
        return self.meeting.control

    @property
    def most_checked_rows(self) -> int:
        busy = [rank for rank in self.ranks if not rank.is_idle]
        are_alike = all(rank.backend.captures or rank.device.type == "cpu" for rank in busy)
        return MOST_AT_ONCE if are_alike else SMALL_BATCH

    @property
    def has_kernels(self) -> bool:
        """Whether any rank has kernels whose calls can be recorded or captured."""
        return any(rank.backend.records or rank.backend.captures for rank in self.ranks)

    def warm_up(self) -> None:
        """Compile, record and measure now, so that the first answer does not wait for it."""
        warm_up(self)

    def rehearse(self, n: int) -> bool:
        """Compute n tokens while no kernel waits for another rank; return whether any could wait.

        A device's first pass allocates memory and loads libraries, which waits for its kernels. If
        these wait for a rank that does the same, both wait in vain.
        """
        return self._rehearsed(lambda: self._computed([0] * n, Batch.of_one(0, n, n - 1)))

    def _rehearsed(self, compute: Callable[[], Tensor]) -> bool:
        """Compute while no kernel waits for another rank; return whether any could wait."""
        if not self.meeting.meetings.wait:
            return False
        with self.meeting.without_waiting():
            self._read(compute, _on_host)
            self.executor.wait()
        return True

    def check_loaded(self) -> None:
        """Check that there are ranks.

        Raises:
            EngineError: the runner is closed.
        """
        if not self.ranks:
            raise EngineError("The model has been unloaded.", "Load it again.")

    def forward(self, ids: Sequence[int], batch: Batch) -> Logits:
        """Run the rows of a batch; see `PagedRuntime.forward`."""
        self.check_loaded()
        with self._guard("to compute the next tokens", len(ids)), self._noted(ids, batch):
            return self.compute(ids, batch)

    def sample(
        self, ids: Sequence[int], batch: Batch, wishes: Sequence[SamplingWish | None]
    ) -> Sequence[int | Logits]:
        """Run the rows of a batch, and sample; see `PagedRuntime`."""
        if not any(wishes) or not self.ranks:
            return list(self.forward(ids, batch))
        if self._row_sampling is None:
            head = self.ranks[self.ranks[0].model.split.last_group[0]]
            self._row_sampling = RowSampling(self.executor, head, self.n_vocab)
        sampling, tokens = self._row_sampling, ids[batch.first_logit :]
        with self._guard("to compute the next tokens", len(ids)), self._noted(ids, batch):
            return self._computed_rows(
                ids, batch, lambda logits: sampling.results(logits, tokens, wishes)
            )

    @property
    def n_running(self) -> int:
        """Number of tokens that were started without logits and are not computed yet."""
        with self._guard("to compute the next tokens", 1), self._recovering():
            return self.batches.n_running

    def finish(self) -> None:
        """Wait for all batches that were started without logits; see `PagedRuntime.finish`."""
        with self._guard("to compute the next tokens", 1), self._recovering():
            self.batches.finish()

    def compute(self, ids: Sequence[int], batch: Batch) -> Logits:
        """Run the rows of a batch and return their logits; see `PagedRuntime.forward`.

        Without logits nothing is read from devices: hosts start a few batches ahead of them.
        """
        if batch.first_logit >= len(ids):
            with self._recovering():
                self.batches.start(self.ranks, ids, batch)
            return np.empty((0, self.n_vocab), np.float32)
        return self._computed_rows(ids, batch, _on_host)

    def _computed_rows(self, ids: Sequence[int], batch: Batch, read: Callable[[Tensor], T]) -> T:
        """Run the rows of a batch; return what `read` makes of their logits."""
        ranks = self.ranks
        if not self.has_kernels or not may_repeat(batch, ranks, can_rewind=self.can_rewind):
            return self._read(lambda: self._computed(ids, batch), read)
        wide_ids, wide = padded(ids, batch, ranks)
        size = size_of(wide, ranks)
        self.n_single[size] += captures_tokens()
        if self._sizes.has(size, ranks):
            self._sizes.note(size, ranks)
            return self._read(lambda: self._replayed(wide_ids, wide)[: len(ids)], read)
        if self._sizes.is_due(size, ranks):
            slot, has_states = batch.pieces[0].slot, size == 1 and not self.can_rewind
            before = self.copied_states(slot) if has_states else ()
            found = self._read(lambda: self._record(wide_ids, wide)[: len(ids)], read)
            self._sizes.note(size, ranks)
            if has_states:  # from others than those before it, it would cache other keys and values
                behind = self.copied_states(slot)
                self.put_states(slot, before)
                self.sample_on_device(ids[0], batch.pieces[0])
                self.put_states(slot, behind)
            elif size == 1:
                self.sample_on_device(ids[0], batch.pieces[0])
            return found
        return self._read(lambda: self._computed(ids, batch), read)

    def _computed(self, ids: Sequence[int], batch: Batch) -> Tensor:
        """Compute tokens on all ranks, without recordings; return the logits."""
        return self._logits(self.batches.task(self.ranks, ids, batch))

    def _logits(self, compute: Callable[[int], Tensor | None]) -> Tensor:
        """Compute on all ranks; return the logits, which exactly one rank returns."""
        return self._found(self.executor.run(compute, is_watched=True))

    def _found(self, found: Sequence[Tensor | None]) -> Tensor:
        """Return the only value that is not None."""
        (logits,) = (x for x in found if x is not None)
        return logits

    def _replayed(self, ids: Sequence[int], batch: Batch) -> Tensor:
        """Replay the recordings for single tokens; return the logits."""
        self.batches.finish()  # the limit of a token's time is not meant for them
        ranks, size = self.ranks, size_of(batch, self.ranks)
        # a lost rank may still read others' memory
        kept = [rank.recordings[size] for rank in ranks]
        replays = [x for x in kept if isinstance(x, Replay)]
        if len(replays) < len(ranks):
            return self._logits(lambda rank: ranks[rank].replay(ids, batch) if kept else None)
        return self._repeated(replays, ids, batch)

    def _repeated(self, replays: Sequence[Replay], ids: Sequence[int], batch: Batch) -> Tensor:
        """Replay what each rank has captured, for other tokens; return the logits."""
        self.batches.finish()  # the limit of a token's time is not meant for them
        return self._found(repeated_on(self.executor, self.ranks, replays, ids, batch))

    @property
    def is_captured_whole(self) -> bool:
        """Whether a token is a single graph on each device, without work of the host between."""
        return self._is_whole(1)

    def _is_whole(self, size: PassSize) -> bool:
        """Return whether passes of a size are a single graph on each device."""
        found = [rank.recordings.get(size) for rank in self.ranks]
        return bool(found) and all(isinstance(x, Replay) and x.is_whole for x in found)

    def start(self, ids: Sequence[int], batch: Batch) -> None:
        """Start tokens on all devices from the calling thread; if each has one graph."""
        ranks = self.ranks
        self.executor.call_inline(lambda rank: ranks[rank].begin(ids, batch))
        self.executor.call_inline(lambda rank: ranks[rank].start())

    def _read(self, compute: Callable[[], Tensor], read: Callable[[Tensor], T]) -> T:
        """Return what `read` makes of computed logits, once one-shot all-reduces have succeeded.

        Recovers after any failure, see `recover`.

        Raises:
            CommError: a rank was missing from an all-reduce, or does not finish.
        """
        with self._recovering():
            found = read(compute())
            self.batches.finish()
        return found

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        """Recover after any failure, also one of a one-shot all-reduce; see `recover`."""
        try:
            yield
            problem = self.one_shots.problem() if self.one_shots else None
            if problem is not None:
                raise problem
        except BaseException:
            self.recover()
            raise

    def _record(self, ids: Sequence[int], batch: Batch) -> Tensor:
        """Compute single tokens and record or capture that; return the logits.

        If that is not possible, tokens are computed step by step from now on.
        """
        ranks = self.ranks
        self.batches.finish()
        if not are_captured(ranks):
            return self._logits(lambda rank: ranks[rank].record(ids, batch))
        from engine.backends.gpu.launch.graph import NotRepeatable

        try:
            replays, logits = self._captured(lambda rank: rank.capture_task(ids, batch))
        except NotRepeatable as error:
            self._refuse(batch.captured_size, str(error))
            return self._computed(ids, batch)
        for rank, replay in zip(ranks, replays, strict=True):
            rank.recordings[batch.captured_size], rank.refusal = replay, ""
        self._note_parts(batch.captured_size)
        return logits

    def _captured(self, task: Callable[[Rank], CaptureTask]) -> tuple[Sequence[Replay], Tensor]:
        """Compute each rank's task and capture it; return the captures, and the logits."""
        self.batches.finish()
        found, results = captured_on(self.executor, self.meeting, self.ranks, task)
        return found, self._found(results)

    @property
    def _gpus(self) -> list[str]:
        """Names of the devices on which tokens are captured."""
        busy = (rank for rank in self.ranks if not rank.is_idle)
        return [str(rank.device) for rank in busy if rank.backend.captures]

    def _note_parts(self, size: PassSize) -> None:
        """Report whether hosts take part in passes of a size though all ranks are on GPUs."""
        if self._is_whole(size):
            self.fallbacks.withdraw("exchange")
            return
        busy = [rank for rank in self.ranks if not rank.is_idle]
        is_for_gpus = all(rank.backend.captures and rank.backend.compiles for rank in busy)
        is_known = any(found.kind == "exchange" for found in self.fallbacks.current)
        if is_for_gpus and not is_known:
            self.fallbacks.report("exchange", self._gpus, "its kernels cannot do all of them")

    def _refuse(self, size: PassSize, why: str) -> None:
        """Give up recording passes of a size, for good."""
        log.warning("passes of size %s are computed step by step: %s", size, why)
        self._sizes.refuse(size)
        if size != 1:
            return
        self.fallbacks.report("graph", self._gpus, why)
        for rank in self.ranks:
            rank.refusal = why

    def sample_on_device(self, token: int = 0, piece: Piece = FIRST_TOKEN) -> None:
        """Set up the sampling of tokens on the devices, if GPUs hold the whole model.

        Args:
            token: token that has just been computed: what is cached of it is computed once more.
            piece: where it lies, with the recurrent states before it; as long as nothing is
                cached, anywhere.
        """
        is_sure = all(
            rank.backend.samples and 1 in rank.recordings and not rank.refusal
            for rank in self.ranks
            if not rank.is_idle
        )
        if self.token_source is not None or not captures_tokens() or not is_sure:
            return
        from engine.backends.gpu.decode.token_stream import TokenStream
        from engine.backends.gpu.launch.graph import NotRepeatable

        steps = token_steps(self.ranks, self.one_shots, self.n_vocab, can_rewind=self.can_rewind)
        me = weakref.ref(self)
        if not steps:
            self.fallbacks.report("sampling", self._gpus, NO_CANDIDATES)
            return
        try:
            stream = TokenStream(
                steps, self.executor, self.one_shots, lambda error: _fail(me(), error),
                fallbacks=self.fallbacks,
            )  # fmt: skip
            stream.prepare(token, piece)
        except (EngineError, NotRepeatable) as error:
            stopped = stopped_error(error, self.executor.devices)
            if self.executor.lost or stopped:
                self.close()
                if stopped is not None:
                    raise stopped from None
                raise
            log.warning("tokens are sampled by the host: %s", error)
            self.fallbacks.report("sampling", self._gpus, str(error))
        else:
            self.fallbacks.withdraw("sampling")
            self.token_source = self.noted(stream)

    def recover(self) -> None:
        """Make the runner usable again after a failure, perhaps in the middle of a token.

        If a rank is lost, close it.
        """
        self.drop_recordings()
        self.batches.forget()
        if self.executor.lost:
            self.close()
        else:
            self.executor.reset()

    def drop_recordings(self) -> None:
        """Drop the ranks' recordings and the token source."""
        self.token_source = self._row_sampling = None
        self._sizes.clear(self.ranks)

    def close(self) -> None:
        """Free everything, and raise nothing; safe to call twice.

        What a lost rank uses is freed when its thread returns.
        """
        lost = self.executor.lost
        closing = [rank.close for rank in self.ranks if rank.number not in lost]
        call_all(self.drop_recordings, *closing)
        self.ranks.clear()  # a lost rank's function refers to this list, too


def _on_host(logits: Tensor) -> Logits:
    """Return logits as an array of the host."""
    found: Logits = logits.cpu().numpy()
    return found


def _fail(runner: ModelRunner | None, error: Exception) -> None:
    """Make a runner usable again after a failure, and explain that; do nothing once it is gone.

    Raises:
        Exception: the error to show.
    """
    if runner is not None:
        runner.recover()
        with runner._guard("to compute the next tokens", 1):
            raise error
