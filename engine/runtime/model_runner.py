"""Forward passes on all ranks of a model: batches of tokens, and single tokens, which replay."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from engine.errors import CommError, EngineError
from engine.hardware.backend_choice import captures_tokens
from engine.hardware.fallbacks import Fallbacks
from engine.hardware.faults import call_all, stopped_error
from engine.runtime import micro_batches
from engine.runtime.prompt_batches import PromptBatches
from engine.runtime.rank import FEW_ROWS, Rank, Replay, rehearsed_rows, token_steps

if TYPE_CHECKING:
    from engine.gpu.decode.rank_capture import OneShotControl
    from engine.parallel.executor import RankExecutor
    from engine.runtime.interface import Guard
    from engine.sampling.token_source import Logits, TokenSource

log = logging.getLogger(__name__)


NO_CANDIDATES = "its kernels cannot compare the likeliest tokens of all devices"
"""Reason for sampling on the host where ranks have no kernels that meet."""


class ModelRunner:
    """Runner of forward passes on all ranks of one model.

    Every single token takes the same operations, so one is recorded and then replayed: as native
    calls if all ranks use the CPU's kernels (`engine.cpu.recorder`), else as CUDA graphs on the
    ranks with GPUs, in several parts if the hosts make the collectives
    (`engine.gpu.decode.rank_capture`).

    Args:
        executor: executor of the ranks.
        n_vocab: number of tokens of the vocabulary.
        n_ctx: size of the context in tokens.
        n_batch: largest number of prompt tokens in a forward pass.
        can_rewind: whether the cache can drop its last tokens.
        guard: returns the contexts of calls on the ranks.
        fallbacks: list of what makes the GPUs slower.

    Attributes:
        executor: executor of the ranks.
        ranks: the ranks, in rank order; empty once closed.
        batches: batches of prompts.
        token_source: samples tokens where they are computed; None if the host samples all.
        one_shots: one-shot all-reduces of the ranks' kernels; None if there are none, or retired.
        n_single: number of tokens computed singly since the recordings were last dropped.
    """

    def __init__(
        self, executor: RankExecutor, n_vocab: int, n_ctx: int, n_batch: int, *, can_rewind: bool,
        guard: Guard = lambda doing, n_tokens: nullcontext(), fallbacks: Fallbacks | None = None,
    ) -> None:  # fmt: skip
        self.ranks: list[Rank] = []
        self.token_source: TokenSource | None = None
        self.one_shots: OneShotControl | None = getattr(executor.group, "one_shots", None)
        self.n_single = 0
        self.executor = executor
        self.n_vocab, self.n_ctx, self.n_batch = n_vocab, n_ctx, n_batch
        self.can_rewind = can_rewind
        self._guard = guard
        self.fallbacks = Fallbacks() if fallbacks is None else fallbacks
        self._refusal = ""
        self.batches = PromptBatches(executor)
        self._has_tried_again = False

    @property
    def has_kernels(self) -> bool:
        """Whether any rank has kernels whose calls can be recorded or captured."""
        return any(rank.backend.records or rank.backend.captures for rank in self.ranks)

    @property
    def _captures(self) -> bool:
        """Whether any rank captures tokens on its device."""
        return any(rank.backend.captures for rank in self.ranks)

    @property
    def _n_until_recorded(self) -> int:
        """Number of tokens computed singly up to the recorded one, which is included.

        The first one allocates what is kept. A capture computes its token without recording first,
        so there it can be the first one.
        """
        return 1 if self._captures else 2

    def warm_up(self) -> None:
        """Compile, record and measure now, so that the first prompt and token do not wait for it.

        If the ranks' kernels wait for each other in vain, all is computed once more, then without
        one-shot all-reduces.
        """
        if not self.has_kernels:
            return
        while True:
            try:
                self._warm_up()
            except CommError as error:
                if self.executor.lost or not self._may_try_again(str(error)):
                    raise
            else:
                self._has_tried_again = False
                return

    def _warm_up(self) -> None:
        """Compute the passes of `warm_up` once."""
        for _ in range(self._n_until_recorded):
            self.compute([0], 0, 0)
        if any(rank.backend.compiles for rank in self.ranks):
            most = min(self.n_ctx, self.n_batch)
            for n in rehearsed_rows(most):
                is_done = self._rehearse(n) and n > FEW_ROWS  # no kernel of large sums waits
                if not is_done:
                    self.compute([0] * n, 0, n - 1)
            self._try_micro_batches(min(most, micro_batches.TRIED_ROWS))
        for rank in self.ranks:
            rank.backend.prepare()

    def _rehearse(self, n: int) -> bool:
        """Compute n tokens while no kernel waits for another rank; return whether any could wait.

        A device's first pass allocates memory and loads libraries, which waits for its kernels. If
        these wait for a rank that does the same, both wait in vain.
        """
        if self.one_shots is None or not self.executor.has_gpus:
            return False
        with self.one_shots.without_waiting():
            self._read(lambda: self._computed([0] * n, 0, n - 1))
            self.executor.wait()
        return True

    def forward(self, ids: Sequence[int], n_past: int, first_logit: int) -> Logits:
        """Run tokens after `n_past` cached ones; see `Runtime.forward`."""
        if not self.ranks:
            raise EngineError("The model has been unloaded.", "Load it again.")
        with self._guard("to compute the next tokens", len(ids)):
            return self.compute(ids, n_past, first_logit)

    @property
    def n_running(self) -> int:
        """Number of tokens that were started without logits and are not computed yet."""
        with self._guard("to compute the next tokens", 1), self._recovering():
            return self.batches.n_running

    def finish(self) -> None:
        """Wait for all batches that were started without logits; see `Runtime.finish`."""
        with self._guard("to compute the next tokens", 1), self._recovering():
            self.batches.finish()

    def save_recurrent(self) -> None:
        """Save a copy of all recurrent states, in place of an earlier one."""
        ranks = self.ranks
        with self._guard("to keep a state", 1):
            self.executor.run(lambda rank: ranks[rank].context.cache.save())

    def restore_recurrent(self) -> None:
        """Restore all recurrent states from the saved copy."""
        ranks = self.ranks
        with self._guard("to go back to a state", 1):
            self.executor.run(lambda rank: ranks[rank].context.cache.restore())

    def compute(self, ids: Sequence[int], n_past: int, first_logit: int) -> Logits:
        """Run tokens after `n_past` cached ones and return their logits; see `Runtime.forward`.

        Without logits nothing is read from devices: hosts start a few batches ahead of them.
        """
        if first_logit >= len(ids):
            with self._recovering():
                self.batches.start(self.ranks, ids, n_past)
            return np.empty((0, self.n_vocab), np.float32)
        is_single = len(ids) == 1 and self.has_kernels
        self.n_single += is_single and captures_tokens()
        if is_single and all(rank.recording for rank in self.ranks):
            return self._read(lambda: self._replayed(ids[0], n_past))
        if is_single and self.n_single == self._n_until_recorded and not self._refusal:
            logits = self._read(lambda: self._record(ids[0], n_past))
            self.sample_on_device(n_past + 1)
            return logits
        return self._read(lambda: self._computed(ids, n_past, first_logit))

    def _try_micro_batches(self, n: int) -> None:
        """Measure whether batches of n tokens take less time in micro-batches; keep the answer."""
        if n < micro_batches.LEAST_ROWS or not any(rank.micro_batches for rank in self.ranks):
            return

        def compute(in_micro_batches: bool) -> None:
            self.batches.in_micro_batches = in_micro_batches
            self.compute([0] * n, 0, n - 1)

        self.batches.in_micro_batches = micro_batches.micro_batches_pay(compute)

    def _computed(self, ids: Sequence[int], n_past: int, first_logit: int) -> Tensor:
        """Compute tokens on all ranks, without recordings; return the logits."""
        return self._logits(self.batches.task(self.ranks, ids, n_past, first_logit))

    def _logits(self, compute: Callable[[int], Tensor | None]) -> Tensor:
        """Compute on all ranks; return the logits, which exactly one rank returns."""
        return _only(self.executor.run(compute, is_watched=True))

    def _replayed(self, token: int, n_past: int) -> Tensor:
        """Replay the recordings for a token; return the logits."""
        self.batches.finish()  # the limit of a token's time is not meant for them
        ranks = self.ranks
        kept = [rank.recording for rank in ranks]  # a lost rank may still read others' memory
        replays = [x for x in kept if isinstance(x, Replay)]
        if len(replays) < len(ranks):
            return self._logits(lambda rank: ranks[rank].replay(token, n_past) if kept else None)
        if self.is_captured_whole:
            self.start(token, n_past)
        else:
            self.executor.run(lambda rank: ranks[rank].restart(token, n_past), is_watched=True)
        if len(ranks) > 1:
            self.executor.wait()  # all devices may take part in the logits of one
        return _only([replay.result for replay in replays])

    @property
    def is_captured_whole(self) -> bool:
        """Whether a token is a single graph on each device, without work of the host between."""
        found = [rank.recording for rank in self.ranks]
        return bool(found) and all(isinstance(x, Replay) and x.is_whole for x in found)

    def start(self, token: int, n_past: int) -> None:
        """Start a token on all devices from the calling thread; needs `is_captured_whole`."""
        ranks = self.ranks
        self.executor.call_inline(lambda rank: ranks[rank].begin(token, n_past))
        self.executor.call_inline(lambda rank: ranks[rank].start())

    def _read(self, compute: Callable[[], Tensor]) -> Logits:
        """Return the logits of `compute` on the host, once all one-shot all-reduces have succeeded.

        Recovers after any failure, see `recover`.

        Raises:
            CommError: a rank was missing from an all-reduce, or does not finish.
        """
        with self._recovering():
            found: Logits = compute().cpu().numpy()
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

    def _record(self, token: int, n_past: int) -> Tensor:
        """Compute a token and record or capture it; return the logits.

        If that is not possible, tokens are computed step by step from now on.
        """
        ranks = self.ranks
        self.batches.finish()
        if not self._captures:
            return self._logits(lambda rank: ranks[rank].record(token, n_past))
        from engine.gpu.decode.rank_capture import Unproven, capture_on_all
        from engine.gpu.launch.graph import NotRepeatable

        while True:
            tasks = [rank.capture_task(token, n_past) for rank in ranks]
            try:
                replays, results = capture_on_all(self.executor, tasks, self.one_shots)
            except NotRepeatable as error:
                if not isinstance(error, Unproven) or not self._may_try_again(str(error)):
                    self._refuse(str(error))
                    return self._computed([token], n_past, 0)
            else:
                self._has_tried_again = False
                for rank, part in zip(ranks, replays.parts, strict=True):
                    rank.recording, rank.refusal = Replay(part), ""
                self._note_parts()
                return _only(results)

    def _may_try_again(self, why: str) -> bool:
        """Return whether to repeat what failed because kernels of ranks meet, or might have.

        The first time it is repeated as it was: what had to be allocated or loaded is there by
        then. The second time one-shot all-reduces are retired.
        """
        if self.one_shots is None:
            return False
        if self._has_tried_again:
            return self._retire_one_shots(why)
        log.info("kernels of the ranks meet once more: %s", why)
        self._has_tried_again = True
        return True

    @property
    def _gpus(self) -> list[str]:
        """Names of the devices on which tokens are captured."""
        busy = (rank for rank in self.ranks if not rank.is_idle)
        return [str(rank.device) for rank in busy if rank.backend.captures]

    def _note_parts(self) -> None:
        """Report whether hosts take part in each token though all ranks are on GPUs."""
        if self.is_captured_whole:
            self.fallbacks.withdraw("exchange")
            return
        busy = [rank for rank in self.ranks if not rank.is_idle]
        is_for_gpus = all(rank.backend.captures and rank.backend.compiles for rank in busy)
        is_known = any(found.kind == "exchange" for found in self.fallbacks.current)
        if is_for_gpus and not is_known:
            self.fallbacks.report("exchange", self._gpus, "its kernels cannot do all of them")

    def _retire_one_shots(self, why: str) -> bool:
        """Stop using one-shot all-reduces; return whether they were in use."""
        if self.one_shots is None:
            return False
        self.one_shots.retire(why)
        self.one_shots = None
        return True

    def _refuse(self, why: str) -> None:
        """Give up recording tokens, for good."""
        log.warning("tokens are computed step by step: %s", why)
        self._refusal = why
        self.fallbacks.report("graph", self._gpus, why)
        for rank in self.ranks:
            rank.refusal = why

    def sample_on_device(self, n_past: int) -> None:
        """Set up the sampling of tokens on the devices, if GPUs hold the whole model.

        Args:
            n_past: number of cached tokens; these and recurrent states stay as they are.
        """
        is_sure = all(
            rank.backend.samples and rank.recording and not rank.refusal
            for rank in self.ranks
            if not rank.is_idle
        )
        has_room = n_past < self.n_ctx
        if self.token_source is not None or not has_room or not captures_tokens() or not is_sure:
            return
        from engine.gpu.decode.token_stream import TokenStream
        from engine.gpu.launch.graph import NotRepeatable

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
            stream.prepare(0, n_past)
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
            self.token_source = stream

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
        self.n_single = 0
        self.token_source = None
        for rank in self.ranks:
            rank.recording = None

    def close(self) -> None:
        """Free everything, and raise nothing; safe to call twice.

        What a lost rank uses is freed when its thread returns.
        """
        lost = self.executor.lost
        closing = [rank.close for rank in self.ranks if rank.number not in lost]
        call_all(self.drop_recordings, *closing)
        self.ranks.clear()  # a lost rank's function refers to this list, too


def _only(found: Sequence[Tensor | None]) -> Tensor:
    """Return the only value that is not None."""
    (logits,) = (x for x in found if x is not None)
    return logits


def _fail(runner: ModelRunner | None, error: Exception) -> None:
    """Make a runner usable again after a failure, and explain that; do nothing once it is gone.

    Raises:
        Exception: the error to show.
    """
    if runner is not None:
        runner.recover()
        with runner._guard("to compute the next tokens", 1):
            raise error
