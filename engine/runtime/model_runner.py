"""Forward passes on all ranks of a model; single-token passes are recorded and replayed."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.errors import CommError, EngineError, Sentence
from engine.hardware.backend_choice import captures_tokens
from engine.hardware.fallbacks import Fallbacks
from engine.hardware.faults import call_all, stopped_error
from engine.model.forward.batch import FIRST_TOKEN, MAX_AT_ONCE, SMALL_BATCH, Batch, PassSize, Piece
from engine.model.forward.state import RecurrentState
from engine.model.sharding.split import as_one, runs
from engine.runtime import micro_batches
from engine.runtime.interface import page_groups
from engine.runtime.mtp_reading import MAX_AHEAD, NotedSource, UnreadTokens
from engine.runtime.pass_executor import OneShotUse, PassExecutor, gpus_of, has_kernels, make_passes
from engine.runtime.prompt_batches import PromptBatches
from engine.runtime.rank import FEW_ROWS, Rank, rehearsed_rows, token_steps
from engine.runtime.row_sampling import RowSampling

if TYPE_CHECKING:
    from engine.backends.executor import RankExecutor
    from engine.backends.gpu.comm.one_shot import OneShotGroups
    from engine.decoding.sampling.sampler import Logits, SamplingRequest
    from engine.model.forward.pages import AttentionWindow
    from engine.model.forward.state import CacheSize
    from engine.runtime.interface import Guard, SlotState, TokenSource
    from engine.runtime.memory import CachedRows
    from engine.runtime.mtp_reading import Reading

T = TypeVar("T")

log = logging.getLogger(__name__)

NEXT_TOKENS = Sentence("to compute the next tokens")
BEGIN = Sentence("to start a sequence")
COPY = Sentence("to copy the cache")
DRAFT = Sentence("to draft tokens")

NO_CANDIDATES = Sentence("its kernels cannot compare the likeliest tokens from all devices")


class ModelRunner:
    """Runner for forward passes on all ranks of one model; the ranks hold the KV cache.

    It runs batches of several sequences without knowing which sequence uses which page; the
    scheduler keeps track of that.

    Single-token passes are recorded and then replayed; see `engine.runtime.pass_executor`.
    MTP blocks draft the next tokens: before a draft they read the tokens that were decoded since
    the last one. A device that samples ahead has to stop for each draft, and models with MTP blocks
    do not compute prompts in micro-batches on GPUs, so `--draft auto` loads them only on CPUs.

    Args:
        executor: executor that runs the ranks.
        n_vocab: vocabulary size.
        size: cache, context and batch sizes.
        windows: attention window of each group of layers.
        can_rewind: whether the cache can drop its last tokens; recurrent states cannot.
        guard: returns the context in which calls on the ranks run.
        fallbacks: fallbacks that make the GPUs slower.

    Attributes:
        ranks: the ranks, in rank order; empty once closed.
        token_source: samples tokens on the device; None if the host samples all of them.
        meeting: use of one-shot all-reduces by the ranks' kernels.
        n_batch: maximum number of rows per pass.
        groups: groups of layers; each has a table in `Piece.tables`, in this order.
        n_slots: number of slots for recurrent states, at least 1.
    """

    def __init__(
        self, executor: RankExecutor, n_vocab: int, size: CacheSize,
        windows: Sequence[AttentionWindow], *, can_rewind: bool,
        guard: Guard = lambda doing, n_tokens: nullcontext(), fallbacks: Fallbacks | None = None,
    ) -> None:  # fmt: skip
        self.ranks: list[Rank] = []
        self.token_source: TokenSource | None = None
        one_shots = getattr(executor.group, "one_shots", None)
        self.meeting = OneShotUse(one_shots, has_gpus=executor.has_gpus)
        self._made_passes: PassExecutor | None = None
        self.executor = executor
        self.n_vocab, self.n_ctx, self.n_batch = n_vocab, size.n_ctx, size.n_batch
        self.groups = page_groups(size, windows)
        self.n_slots = size.n_slots
        self.can_rewind = can_rewind
        self._guard = guard
        self.fallbacks = Fallbacks() if fallbacks is None else fallbacks
        self.batches = PromptBatches(executor)
        self._row_sampling: RowSampling | None = None

    @property
    def one_shots(self) -> OneShotGroups | None:
        """One-shot all-reduces of the ranks' kernels; None if unavailable or retired."""
        return self.meeting.control

    @property
    def max_verify_rows(self) -> int:
        """Maximum number of rows for which verifying gives the same bits as single rows."""
        busy = [rank for rank in self.ranks if not rank.is_idle]
        are_alike = all(rank.backend.captures or rank.device.type == "cpu" for rank in busy)
        return MAX_AT_ONCE if are_alike else SMALL_BATCH

    @property
    def passes(self) -> PassExecutor:
        """Executor of single-token passes, created for the loaded ranks on first use."""
        if self._made_passes is None:
            self._made_passes = make_passes(
                self.executor, self.ranks, self.batches, self.meeting, self.fallbacks,
                can_rewind=self.can_rewind,
            )  # fmt: skip
        return self._made_passes

    @property
    def n_single(self) -> Counter[PassSize]:
        """Number of single-token passes since recordings were last dropped, by size."""
        return self.passes.n_single

    def warm_up(self) -> None:
        """Compile, record and measure now, so that the first prompt and token do not have to wait.

        If kernels time out waiting for each other, everything is computed once more without
        one-shot all-reduces.

        Raises:
            EngineError: a pass failed for another reason.
        """
        if not has_kernels(self.ranks):
            return
        while True:
            try:
                self._compute_once()
            except CommError as error:
                if self.executor.lost or not self.meeting.may_try_again(str(error)):
                    raise
            else:
                self.meeting.note_success()
                return

    def _compute_once(self) -> None:
        for _ in range(self.passes.n_until_recorded):
            self.compute([0], Batch.of_one(0, 1, 0))
        compiles = any(rank.backend.compiles for rank in self.ranks)
        if compiles or self.meeting.meetings.wait:  # perhaps only on other machines
            most = min(self.n_ctx, self.n_batch)
            for n in rehearsed_rows(most):
                is_done = self.rehearse(n) and n > FEW_ROWS  # no kernel for large sums waits
                if not is_done:
                    self.compute([0] * n, Batch.of_one(0, n, n - 1))
            self._try_micro_batches(min(most, micro_batches.TRIED_ROWS))
        for rank in self.ranks:
            rank.backend.prepare()

    def _try_micro_batches(self, n: int) -> None:
        if n < micro_batches.MIN_MICRO_ROWS or not any(rank.micro_batches for rank in self.ranks):
            return

        def compute(in_micro_batches: bool) -> None:
            self.batches.in_micro_batches = in_micro_batches
            self.compute([0] * n, Batch.of_one(0, n, n - 1))

        self.batches.in_micro_batches = micro_batches.micro_batches_pay(compute)

    def rehearse(self, n: int) -> bool:
        """Compute n tokens while no kernel waits for another rank; return whether any could wait.

        A device's first pass allocates memory and loads libraries, which waits for the device's
        kernels. Two ranks that do so while their kernels wait for each other would deadlock.
        """
        return self._rehearsed(lambda: self._computed([0] * n, Batch.of_one(0, n, n - 1)))

    def _rehearsed(self, compute: Callable[[], Tensor]) -> bool:
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
        """Run tokens of one or several sequences and return their logits.

        Args:
            ids: token ids, piece by piece.
            batch: description of the rows. The pages in its tables must not be used for anything
                else until the pass has finished. If no logits are requested, devices may still be
                computing when this returns; errors then come later, at the latest from `finish`.

        Returns:
            (len(ids) - batch.first_logit, n_vocab), or (len(ids) - batch.first_logit, n_embd) if
            the batch requests hidden states.

        Raises:
            EngineError: the model was closed, a device ran out of memory or a rank was lost; the
                contents of the cache are then undefined.
        """
        self.check_loaded()
        with self._guard(NEXT_TOKENS, len(ids)), self._noted(ids, batch):
            return self.compute(ids, batch)

    def sample(
        self, ids: Sequence[int], batch: Batch, requests: Sequence[SamplingRequest | None]
    ) -> Sequence[int | Logits]:
        """Run tokens like `forward`, and sample the next ones on a device where possible.

        Random numbers are taken from the samplers, which accept the tokens later.

        Args:
            requests: sampling request for each row from `batch.first_logit` on; None for logits.

        Returns:
            The next token for each of these rows, or logits (n_vocab,) for the host to sample from.
        """
        if not any(requests) or not self.ranks:
            return list(self.forward(ids, batch))
        if self._row_sampling is None:
            head = self.ranks[self.ranks[0].model.split.last_group[0]]
            self._row_sampling = RowSampling(self.executor, head, self.n_vocab)
        sampling, tokens = self._row_sampling, ids[batch.first_logit :]
        with self._guard(NEXT_TOKENS, len(ids)), self._noted(ids, batch):
            return self._computed_rows(
                ids, batch, lambda logits: sampling.results(logits, tokens, requests)
            )

    @property
    def n_running(self) -> int:
        """Number of tokens that `forward` has started and devices have not computed yet.

        Raises:
            EngineError: a device has failed in the meantime; see `forward`.
        """
        with self._guard(NEXT_TOKENS, 1), self._recovering():
            return self.batches.n_running

    def finish(self) -> None:
        """Wait for all batches that were started without logits."""
        with self._guard(NEXT_TOKENS, 1), self._recovering():
            self.batches.finish()

    def compute(self, ids: Sequence[int], batch: Batch) -> Logits:
        """Run a batch's rows and return their logits; see `forward`.

        If no logits are requested, nothing is read back, so hosts run a few batches ahead.
        """
        if batch.first_logit >= len(ids):
            with self._recovering():
                self.batches.start(self.ranks, ids, batch)
            return np.empty((0, self.n_vocab), np.float32)
        return self._computed_rows(ids, batch, _on_host)

    def _computed_rows(self, ids: Sequence[int], batch: Batch, read: Callable[[Tensor], T]) -> T:
        passes = self.passes
        if not passes.may_repeat(batch):
            return self._read(lambda: self._computed(ids, batch), read)
        wide_ids, wide = passes.padded(ids, batch)
        size = passes.size_of(wide)
        passes.n_single[size] += captures_tokens()
        if passes.has(size):
            self.batches.finish()  # a token's timeout is too short for prompt batches
            return self._read(lambda: self._found(passes.replay(wide_ids, wide))[: len(ids)], read)
        if not passes.is_due(size):
            return self._read(lambda: self._computed(ids, batch), read)
        slot, has_states = batch.pieces[0].state_slot, size == 1 and not self.can_rewind
        before = self.copied_states(slot) if has_states else ()
        found = self._read(lambda: self._recorded(wide_ids, wide)[: len(ids)], read)
        if has_states:  # keys and values computed from other states would differ
            after = self.copied_states(slot)
            self.put_states(slot, before)
            self.sample_on_device(ids[0], batch.pieces[0])
            self.put_states(slot, after)
        elif size == 1:
            self.sample_on_device(ids[0], batch.pieces[0])
        return found

    def _recorded(self, ids: Sequence[int], batch: Batch) -> Tensor:
        self.batches.finish()
        found = self.passes.record(ids, batch)
        return self._computed(ids, batch) if found is None else self._found(found)

    def _computed(self, ids: Sequence[int], batch: Batch) -> Tensor:
        return self._logits(self.batches.task(self.ranks, ids, batch))

    def _logits(self, compute: Callable[[int], Tensor | None]) -> Tensor:
        return self._found(self.executor.run(compute, is_watched=True))

    def _found(self, found: Sequence[Tensor | None]) -> Tensor:
        (logits,) = (x for x in found if x is not None)
        return logits

    @property
    def is_captured_whole(self) -> bool:
        """Whether a token is a single graph on each device, with no host work in between."""
        return self.passes.is_whole(1)

    def start(self, ids: Sequence[int], batch: Batch) -> None:
        """Start tokens on all devices from the calling thread, if each has a single graph."""
        ranks = self.ranks
        self.executor.call_inline(lambda rank: ranks[rank].begin(ids, batch))
        self.executor.call_inline(lambda rank: ranks[rank].start())

    def _read(self, compute: Callable[[], Tensor], read: Callable[[Tensor], T]) -> T:
        with self._recovering():
            found = read(compute())
            self.batches.finish()
        return found

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        try:
            yield
            problem = self.one_shots.problem() if self.one_shots else None
            if problem is not None:
                raise problem
        except BaseException:
            self.recover()
            raise

    @property
    def drafter(self) -> Self | None:
        """The runner itself if the model has an MTP block, else None."""
        return self if self._n_blocks else None

    @property
    def max_drafts(self) -> int:
        """Maximum number of consecutive drafts: the number of blocks, or 0 (no limit) for one."""
        return self._n_blocks if self._n_blocks > 1 else 0

    @property
    def _n_blocks(self) -> int:
        return self.ranks[0].model.hp.n_mtp if self.ranks else 0

    @cached_property
    def _unread(self) -> UnreadTokens:
        return UnreadTokens(self._n_blocks)

    def noted(self, source: TokenSource) -> TokenSource:
        """Return a token source that keeps tokens for MTP blocks, if any, to read."""
        if self.drafter is None:
            return source
        me = weakref.ref(self)  # this object refers to the source
        return NotedSource(source, self._unread, lambda batch: _read_due(me(), batch))

    def draft(self, ids: Sequence[int], batch: Batch, number: int = 0) -> Logits:
        """Return an MTP block's logits (n, n_vocab) for the tokens after `ids`.

        A single block drafts any number of tokens, one after the other. If there are several, the
        first drafts the first token, the second the next one, and so on.

        Args:
            ids: one token per sequence: the next one to compute, or the last draft.
            batch: their positions, as in the pass that will compute them; pages are reserved.
            number: number of drafts made immediately before this one.

        Raises:
            EngineError: see `forward`.
        """
        self.check_loaded()
        with self._guard(DRAFT, 1):
            before, (block, rows) = self._unread.joined(ids, batch, number)
            self._read_tokens(before)
            logits = self._read(lambda: self._drafted(*rows, block), lambda x: x.cpu().numpy())
            self._unread.note_guess(batch, number)
            return logits

    @contextmanager
    def _noted(self, ids: Sequence[int], batch: Batch) -> Iterator[None]:
        """Surround a pass over the main blocks: MTP blocks read what is due and note the ids."""
        if self.drafter is None:
            yield
            return
        self._read_tokens(self._unread.due(batch))
        yield
        self._unread.note(ids, batch)

    def _read_tokens(self, passes: Iterable[Reading]) -> None:
        ranks = self.ranks
        for block, (ids, batch) in passes:
            tokens = torch.tensor(ids)
            with self._recovering():
                self.executor.run(partial(_read_on, ranks, tokens, batch, block), is_watched=True)

    def forget_hidden_states(self, batch_index: int) -> None:
        """Forget the hidden states at a batch index that a new sequence now uses."""
        ranks = self.ranks
        self._unread.forget(batch_index)
        with self._guard(BEGIN, 1):
            self.executor.run(lambda rank: ranks[rank].context.forget_hidden_states(batch_index))

    def _drafted(self, ids: Sequence[int], batch: Batch, block: int) -> Tensor:
        found = self.passes.draft(
            ids, batch, block, lambda task: self._rehearsed(lambda: self._logits(task))
        )
        return self._found(found)[: len(ids) - batch.first_logit]

    def sample_on_device(self, token: int = 0, piece: Piece = FIRST_TOKEN) -> None:
        """Set up the sampling of tokens on the devices, if GPUs hold the whole model.

        Args:
            token: token that has just been computed; it is computed once more.
            piece: its position, with the recurrent states before it; arbitrary if the cache is
                empty.
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
            self.fallbacks.report("sampling", gpus_of(self.ranks), NO_CANDIDATES)
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
            self.fallbacks.report("sampling", gpus_of(self.ranks), str(error))
        else:
            self.fallbacks.withdraw("sampling")
            self.token_source = self.noted(stream)

    # the cache

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Copy a page in a layer group on all ranks, after any earlier work."""
        ranks = self.ranks
        with self._guard(COPY, 1):
            self.executor.run(
                lambda rank: ranks[rank].context.cache.copy_page(group, source, target)
            )

    def clear_slot(self, slot: int) -> None:
        """Reset a slot's recurrent states to those of an empty sequence."""
        ranks = self.ranks
        with self._guard(BEGIN, 1):
            self.executor.run(lambda rank: ranks[rank].context.cache.reset(slot))

    @torch.inference_mode()
    def save_slot(self, slot: int) -> tuple[SlotState, int]:
        """Return a host copy of a slot's recurrent states, and its size in bytes."""
        self.finish()
        found = []
        with self._guard(Sentence("to save a recurrent state"), 1):
            for index, state in self._recurrent_states():
                whole = {name: torch.empty(shape) for name, shape in state.whole_shapes().items()}
                for name, cut in state.cuts().items():
                    for run in runs(cut, as_one(cut), 0, range(len(self.ranks))):
                        rank = self.ranks[run.source]
                        held = rank.context.cache.tensors(rank.states[index], slot)[name]
                        part = held[run.start : run.start + run.n]
                        whole[name][run.goal : run.goal + run.n] = part
                found.append(whole)
        return found, sum(x.nbytes for tensors in found for x in tensors.values())

    @torch.inference_mode()
    def load_slot(self, slot: int, state: SlotState) -> None:
        """Restore a slot's recurrent states from a copy."""
        with self._guard(Sentence("to restore a recurrent state"), 1):
            for (index, declared), whole in zip(self._recurrent_states(), state, strict=True):
                for rank in self.ranks:
                    held = rank.context.cache.tensors(rank.states[index], slot)
                    for name, cut in declared.cuts().items():
                        for run in runs(as_one(cut), cut, rank.number, [0]):
                            part = whole[name][run.start : run.start + run.n]
                            held[name][run.goal : run.goal + run.n] = part.to(rank.device)

    def copied_states(self, slot: int) -> Sequence[Sequence[Tensor]]:
        """Return copies of each rank's recurrent states for a slot, on that rank's device."""
        ranks = self.ranks

        def copied(rank: int) -> list[Tensor]:
            return [x.clone() for x in ranks[rank].context.cache.recurrent_tensors([slot])]

        return self.executor.run(copied)

    def put_states(self, slot: int, copies: Sequence[Sequence[Tensor]]) -> None:
        """Restore each rank's recurrent states for a slot from `copied_states`."""
        ranks = self.ranks

        def put(rank: int) -> None:
            held = ranks[rank].context.cache.recurrent_tensors([slot])
            for state, copy in zip(held, copies[rank], strict=True):
                state.copy_(copy)

        self.executor.run(put)

    def whole_state(self, state: SlotState) -> SlotState:
        """Return the result of `save_slot` in this process's memory."""
        return state

    def read_rows(self, rows: CachedRows) -> Tensor:
        """Return a host copy of a rank's keys or values; see `CachedRows.read`."""
        with self._guard(COPY, 1), torch.inference_mode():
            return rows.read(self._held(rows))

    def write_rows(self, rows: CachedRows, found: Tensor) -> None:
        """Copy keys or values to a rank; see `CachedRows.write`."""
        with self._guard(COPY, 1), torch.inference_mode():
            rows.write(self._held(rows), found)

    def _held(self, rows: CachedRows) -> Tensor:
        rank = next(rank for rank in self.ranks if rank.number == rows.rank)
        return rank.context.cache.tensors(rank.states[rows.layer])[rows.name]

    def zero_rows(self, layer: int, slots: Sequence[Sequence[int]]) -> None:
        """Zero slots of a layer that has keys and values, on all ranks.

        Args:
            layer: index of the layer in `Rank.states`.
            slots: start and end of each run of adjacent slots.
        """
        with self._guard(COPY, 1), torch.inference_mode():
            for rank in self.ranks:
                for held in rank.context.cache.tensors(rank.states[layer]).values():
                    for start, stop in slots:
                        held[:, start:stop].zero_()

    def _recurrent_states(self) -> Sequence[tuple[int, RecurrentState]]:
        states = enumerate(self.ranks[0].states)
        return [(index, s) for index, s in states if isinstance(s, RecurrentState)]

    # failure and closing

    def recover(self) -> None:
        """Make the runner usable again after a failure, or close it if a rank is lost."""
        self.drop_recordings()
        self.batches.forget()
        if self.executor.lost:
            self.close()
        else:
            self.executor.reset()

    def drop_recordings(self) -> None:
        """Drop the ranks' recordings and the token source."""
        self.token_source = self._row_sampling = None
        for rank in self.ranks:
            rank.recordings.clear()
            rank.draft_recordings.clear()
        if self._made_passes is not None:
            self._made_passes.restart()

    def close(self) -> None:
        """Free everything, raising nothing; safe to call twice.

        Memory that a lost rank uses is freed when its thread returns.
        """
        lost = self.executor.lost
        closing = [rank.close for rank in self.ranks if rank.number not in lost]
        call_all(self.drop_recordings, *closing)
        self.ranks.clear()  # a lost rank's function refers to this list, too


def _on_host(logits: Tensor) -> Logits:
    found: Logits = logits.cpu().numpy()
    return found


def _fail(runner: ModelRunner | None, error: Exception) -> None:
    """Recover the runner if it still exists, and raise an error that explains the failure."""
    if runner is not None:
        runner.recover()
        with runner._guard(NEXT_TOKENS, 1):
            raise error


def _read_due(runner: ModelRunner | None, batch: Batch) -> None:
    if runner is not None:
        with runner._guard(NEXT_TOKENS, 1):
            runner._read_tokens(runner._unread.due(batch, MAX_AHEAD))


def _read_on(ranks: Sequence[Rank], tokens: Tensor, batch: Batch, block: int, rank: int) -> None:
    ranks[rank].read(tokens, batch, block)
