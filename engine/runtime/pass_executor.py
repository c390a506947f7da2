"""Single-token and MTP block passes: computed, then recorded or captured, then replayed.

All passes of the same size run the same operations, so one is recorded and then replayed: as native
calls if all ranks use CPU kernels (`RecordedPasses`), otherwise as CUDA graphs on the ranks with
GPUs, in several parts if the hosts run the collectives (`CapturedPasses`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from engine.errors import Sentence
from engine.model.forward.batch import (
    CAPTURED_ROWS,
    DRAFT_ROWS,
    MAX_AT_ONCE,
    MAX_DRAFTS_CAPTURED,
    MAX_RECORDED,
    Batch,
    PassSize,
    captured_rows,
)
from engine.runtime.rank import Captures, Rank, Replay

if TYPE_CHECKING:
    from torch import Tensor

    from engine.backends.executor import RankExecutor
    from engine.backends.gpu.comm.one_shot import OneShotGroups
    from engine.backends.gpu.decode.rank_capture import CaptureTask
    from engine.hardware.fallbacks import Fallbacks
    from engine.runtime.prompt_batches import PromptBatches
    from engine.runtime.rank import DraftSize

log = logging.getLogger(__name__)

MAX_DRAFTS_RECORDED = 6
"""Maximum number of pass sizes for which recordings of an MTP block are kept."""

Results = Sequence["Tensor | None"]
"""Each rank's result; exactly one, or one per machine, has the logits."""

Rehearse = Callable[[Callable[[int], "Tensor | None"]], object]
"""Runs a task on all ranks in such a way that no kernel waits for another rank."""


def are_captured(ranks: Sequence[Rank]) -> bool:
    """Return whether any rank, on any machine, captures single-token passes."""
    return any(rank.backend.captures or rank.elsewhere.some for rank in ranks)


def captures_of(ranks: Sequence[Rank]) -> Captures:
    """Return which ranks, on all machines, capture single-token passes."""
    return Captures(
        some=are_captured(ranks),
        all=all((r.is_idle or r.backend.captures) and r.elsewhere.all for r in ranks),
    )


def gpus_of(ranks: Sequence[Rank]) -> list[str]:
    """Return the names of the devices on which passes are captured."""
    busy = (rank for rank in ranks if not rank.is_idle)
    return [str(rank.device) for rank in busy if rank.backend.captures]


class KernelMeetings(NamedTuple):
    """Whether the kernels of a model's ranks meet in one-shot all-reduces.

    Attributes:
        some: whether any do.
        wait: whether they wait for each other, as on GPUs. For each size, a pass is then first
            computed without waiting; see `ModelRunner.rehearse`.
    """

    some: bool
    wait: bool


class OneShotUse:
    """One-shot all-reduces of a model's ranks, while they are in use.

    Attributes:
        control: the all-reduces; None if there are none or they were retired.
    """

    def __init__(self, control: OneShotGroups | None, *, has_gpus: bool = False) -> None:
        self.control = control
        self._has_gpus = has_gpus
        self._has_tried_again = False
        self._of_machines: KernelMeetings | None = None
        self._agreed: Callable[[str], str] | None = None

    @property
    def here(self) -> KernelMeetings:
        """Points at which the kernels of this machine's ranks synchronize."""
        return KernelMeetings(self.control is not None, self.control is not None and self._has_gpus)

    @property
    def meetings(self) -> KernelMeetings:
        """Those of all machines' ranks; identical on every machine."""
        return self.here if self._of_machines is None else self._of_machines

    def join(self, meetings: KernelMeetings, agreed: Callable[[str], str] | None) -> None:
        """From now on, agree with the other machines, whose ranks take part in each pass.

        Args:
            meetings: kernel meetings of all machines' ranks.
            agreed: implementation of the method `agreed`; called on all machines.
        """
        self._of_machines, self._agreed = meetings, agreed

    def agreed(self, problem: str) -> str:
        """Send this machine's problem, or ""; return that of the first machine that has one."""
        return problem if self._agreed is None else self._agreed(problem)

    def without_waiting(self) -> AbstractContextManager[object]:
        """Return a context in which no kernel waits for another rank."""
        return nullcontext() if self.control is None else self.control.without_waiting()

    def may_try_again(self, why: str) -> bool:
        """Return whether to repeat a pass that may have failed because kernels wait for each other.

        The first time, it is repeated unchanged, because memory has been allocated and libraries
        loaded by then. The second time, one-shot all-reduces are retired.
        """
        if not self.meetings.some:
            return False
        if self._has_tried_again:
            self._retire(why)
            return True
        log.info("kernels of the ranks meet once more: %s", why)
        self._has_tried_again = True
        return True

    def _retire(self, why: str) -> None:
        if self.control is not None:
            self.control.retire(why)
            self.control = None
        if self._of_machines is not None:
            self._of_machines = KernelMeetings(some=False, wait=False)

    def note_success(self) -> None:
        """Note that kernels have met, so the next failure counts as the first."""
        self._has_tried_again = False


class PassExecutor:
    """Executor that computes passes on all ranks without recording, as for the reference backend.

    Attributes:
        n_until_recorded: which pass of each size is recorded, counted from 1.
        n_single: number of single-token passes since `restart`, by size.
        n_drafts: number of passes over MTP blocks since `restart`, by size.
    """

    n_until_recorded: ClassVar[int] = 2

    def __init__(self, executor: RankExecutor, ranks: Sequence[Rank]) -> None:
        self._executor, self._ranks = executor, ranks
        self.n_single = Counter[PassSize]()
        self.n_drafts: Counter[DraftSize] = Counter()
        self._refused: set[PassSize] = set()

    def may_repeat(self, batch: Batch) -> bool:
        """Return whether a recording can replace this kind of pass."""
        return False

    def size_of(self, batch: Batch) -> PassSize:
        """Return the size under which a single-token pass is recorded."""
        return len(batch.pieces)

    def padded(self, ids: Sequence[int], batch: Batch) -> tuple[Sequence[int], Batch]:
        """Return single tokens padded to a size that is recorded."""
        return ids, batch

    def has(self, size: PassSize) -> bool:
        """Return whether all ranks have a recording for a size."""
        return all(size in rank.recordings for rank in self._ranks)

    def is_due(self, size: PassSize) -> bool:
        """Return whether the current pass, which is already counted, should be recorded."""
        return self.n_single[size] == self.n_until_recorded and size not in self._refused

    def record(self, ids: Sequence[int], batch: Batch) -> Results | None:
        """Compute single tokens and record the pass; return None if it cannot be recorded."""
        return None

    def replay(self, ids: Sequence[int], batch: Batch) -> Results:
        """Replay the recordings for single tokens."""
        raise AssertionError("nothing is recorded")

    def draft(self, ids: Sequence[int], batch: Batch, block: int, rehearse: Rehearse) -> Results:
        """Run an MTP block, recorded or replayed if possible; otherwise `rehearse` the first pass.

        Returns:
            Results with the requested logits, and possibly additional rows.
        """
        ranks = self._ranks
        return self._run(lambda rank: ranks[rank].draft(ids, batch, block))

    def is_whole(self, size: PassSize) -> bool:
        """Return whether passes of a size are a single graph on each device."""
        return False

    def restart(self) -> None:
        """Reset the counters after recordings were dropped."""
        self.n_single.clear()
        self.n_drafts.clear()

    def _run(self, task: Callable[[int], Tensor | None]) -> Results:
        return self._executor.run(task, is_watched=True)


class RecordedPasses(PassExecutor):
    """Passes that each rank records and replays on its own thread, with CPU kernels.

    The first pass of each size allocates buffers, so the second one is recorded.
    """

    def __init__(self, executor: RankExecutor, ranks: Sequence[Rank]) -> None:
        super().__init__(executor, ranks)
        self._used: list[PassSize] = []  # sizes above 1, most recently used last

    def may_repeat(self, batch: Batch) -> bool:
        return _are_few_singles(batch)

    def record(self, ids: Sequence[int], batch: Batch) -> Results:
        ranks = self._ranks
        found = self._run(lambda rank: ranks[rank].record(ids, batch))
        self._note(len(ids))
        return found

    def replay(self, ids: Sequence[int], batch: Batch) -> Results:
        self._note(len(ids))
        ranks = self._ranks
        # a lost rank may still read the other ranks' memory
        kept = [rank.recordings[len(ids)] for rank in ranks]
        return self._run(lambda rank: ranks[rank].replay(ids, batch) if kept else None)

    def _note(self, size: int) -> None:
        if size == 1 or not self.has(size):
            return
        self._used = [*(used for used in self._used if used != size), size]
        if len(self._used) > MAX_RECORDED:
            dropped = self._used.pop(0)
            self.n_single[dropped] = 0
            for rank in self._ranks:
                rank.recordings.pop(dropped, None)

    def draft(self, ids: Sequence[int], batch: Batch, block: int, rehearse: Rehearse) -> Results:
        ranks, size = self._ranks, (block, len(ids), batch.first_logit)
        if all(size in rank.draft_recordings for rank in ranks):
            return self._run(lambda rank: ranks[rank].replay(ids, batch, block))
        self.n_drafts[size] += 1
        if self.n_drafts[size] == self.n_until_recorded:
            self._make_room_for_drafts(block)
            return self._run(lambda rank: ranks[rank].record(ids, batch, block))
        return super().draft(ids, batch, block, rehearse)

    def _make_room_for_drafts(self, block: int) -> None:
        found = (size for rank in self._ranks for size in rank.draft_recordings if size[0] == block)
        sizes = list(dict.fromkeys(found))
        for size in sizes[: max(0, len(sizes) + 1 - MAX_DRAFTS_RECORDED)]:
            self.n_drafts[size] = 0
            for rank in self._ranks:
                rank.draft_recordings.pop(size, None)

    def restart(self) -> None:
        super().restart()
        self._used.clear()


class CapturedPasses(PassExecutor):
    """Passes that GPUs capture, all ranks together; ranks without a GPU recompute theirs.

    A capture computes its tokens first, so the first pass of each size is captured.

    Args:
        batches: prompt batches, which must finish first as a token's timeout is too short.
        meeting: use of one-shot all-reduces by the ranks' kernels.
        can_rewind: whether there are no recurrent states; CPUs would update these again for each
            row that `padded` adds.
    """

    n_until_recorded = 1

    def __init__(
        self, executor: RankExecutor, ranks: Sequence[Rank], batches: PromptBatches,
        meeting: OneShotUse, fallbacks: Fallbacks, *, can_rewind: bool,
    ) -> None:  # fmt: skip
        super().__init__(executor, ranks)
        self._batches, self._meeting, self._fallbacks = batches, meeting, fallbacks
        self._can_rewind = can_rewind
        self._refused_drafts: set[DraftSize] = set()

    def may_repeat(self, batch: Batch) -> bool:
        if not has_kernels(self._ranks) or not _are_few_singles(batch):
            return False
        few = len(batch.pieces) in CAPTURED_ROWS
        return self._can_rewind or few or captures_of(self._ranks).all

    def size_of(self, batch: Batch) -> PassSize:
        return batch.captured_size

    def padded(self, ids: Sequence[int], batch: Batch) -> tuple[Sequence[int], Batch]:
        """Pad single tokens to a captured size by computing the last one repeatedly.

        Its keys and values are written to the same slot again; recurrent states change only once;
        see `engine.backends.gpu.page_tables`.
        """
        n_more = captured_rows(len(ids)) - len(ids)
        if not n_more:
            return ids, batch
        pieces = batch.pieces + batch.pieces[-1:] * n_more
        return [*ids, *[ids[-1]] * n_more], batch._replace(pieces=pieces)

    def record(self, ids: Sequence[int], batch: Batch) -> Results | None:
        from engine.backends.gpu.launch.graph import NotRepeatable

        size = batch.captured_size
        try:
            replays, results = self._captured(lambda rank: rank.capture_task(ids, batch))
        except NotRepeatable as error:
            self._refuse(size, str(error))
            return None
        for rank, replay in zip(self._ranks, replays, strict=True):
            rank.recordings[size], rank.refusal = replay, ""
        self._note_parts(size)
        return results

    def replay(self, ids: Sequence[int], batch: Batch) -> Results:
        kept = [rank.recordings[batch.captured_size] for rank in self._ranks]
        return self._repeated([x for x in kept if isinstance(x, Replay)], ids, batch)

    def draft(self, ids: Sequence[int], batch: Batch, block: int, rehearse: Rehearse) -> Results:
        wide = padded_drafts(ids, batch)
        if wide is not None:
            found = self._repeated_draft(*wide, (block, len(wide[0]), wide[1].first_logit))
            if found is not None:
                return found
        ranks, size = self._ranks, (block, len(ids), batch.first_logit)

        def task(rank: int) -> Tensor | None:
            return ranks[rank].draft(ids, batch, block)

        self.n_drafts[size] += 1
        if self.n_drafts[size] == 1:
            rehearse(task)
        return self._run(task)

    def _repeated_draft(self, ids: Sequence[int], batch: Batch, size: DraftSize) -> Results | None:
        ranks, block = self._ranks, size[0]
        known = {kept for rank in ranks for kept in rank.draft_recordings if kept[0] == block}
        has_room = size in known or len(known) < MAX_DRAFTS_CAPTURED
        if not has_room or size in self._refused_drafts:
            return None
        found = [rank.draft_recordings.get(size) for rank in ranks]
        replays = [replay for replay in found if isinstance(replay, Replay)]
        if len(replays) == len(ranks):
            return self._repeated(replays, ids, batch)
        from engine.backends.gpu.launch.graph import NotRepeatable

        try:
            made, results = self._captured(lambda rank: rank.capture_task(ids, batch, block))
        except NotRepeatable as error:
            log.warning("drafts from %d tokens are computed step by step: %s", len(ids), error)
            self._refused_drafts.add(size)
            return None
        for rank, replay in zip(ranks, made, strict=True):
            rank.draft_recordings[size] = replay
        return results

    def _captured(self, task: Callable[[Rank], CaptureTask]) -> tuple[Sequence[Replay], Results]:
        from engine.backends.gpu.decode.rank_capture import Unproven, capture_on_all

        self._batches.finish()
        meeting = self._meeting
        while True:
            tasks = [task(rank) for rank in self._ranks]
            try:
                found, results = capture_on_all(
                    self._executor, tasks, meeting.control, waits=meeting.meetings.wait,
                    agreed=meeting.agreed,
                )  # fmt: skip
            except Unproven as error:
                if not meeting.may_try_again(str(error)):
                    raise
            else:
                meeting.note_success()
                return [Replay(part) for part in found.parts], results

    def _repeated(self, replays: Sequence[Replay], ids: Sequence[int], batch: Batch) -> Results:
        self._batches.finish()
        executor, ranks = self._executor, self._ranks

        def begin(rank: int) -> None:
            ranks[rank].begin(ids, batch)

        def start(rank: int) -> None:
            replays[rank].start()

        def restart(rank: int) -> None:
            begin(rank)
            start(rank)

        if all(replay.is_whole for replay in replays):
            executor.call_inline(begin)
            executor.call_inline(start)
        else:
            executor.run(restart, is_watched=True)
        if len(ranks) > 1:
            executor.wait()  # all devices may take part in computing one device's logits
        return [replay.result for replay in replays]

    def is_whole(self, size: PassSize) -> bool:
        found = [rank.recordings.get(size) for rank in self._ranks]
        return bool(found) and all(isinstance(x, Replay) and x.is_whole for x in found)

    def _note_parts(self, size: PassSize) -> None:
        if self.is_whole(size):
            self._fallbacks.withdraw("exchange")
            return
        busy = [rank for rank in self._ranks if not rank.is_idle]
        is_for_gpus = all(rank.backend.captures and rank.backend.compiles for rank in busy)
        is_known = any(found.kind == "exchange" for found in self._fallbacks.current)
        if is_for_gpus and not is_known:
            why = Sentence("its kernels do not support all of them")
            self._fallbacks.report("exchange", gpus_of(self._ranks), why)

    def _refuse(self, size: PassSize, why: str) -> None:
        log.warning("passes of size %s are computed step by step: %s", size, why)
        self._refused.add(size)
        if size != 1:
            return
        self._fallbacks.report("graph", gpus_of(self._ranks), why)
        for rank in self._ranks:
            rank.refusal = why


def make_passes(
    executor: RankExecutor, ranks: Sequence[Rank], batches: PromptBatches, meeting: OneShotUse,
    fallbacks: Fallbacks, *, can_rewind: bool,
) -> PassExecutor:  # fmt: skip
    """Return the pass executor for the ranks' backends; see `CapturedPasses`."""
    if are_captured(ranks):
        return CapturedPasses(executor, ranks, batches, meeting, fallbacks, can_rewind=can_rewind)
    return RecordedPasses(executor, ranks) if has_kernels(ranks) else PassExecutor(executor, ranks)


def has_kernels(ranks: Sequence[Rank]) -> bool:
    """Return whether any rank can record or capture calls to its kernels."""
    return any(rank.backend.records or rank.backend.captures for rank in ranks)


def _are_few_singles(batch: Batch) -> bool:
    """Return whether all rows are single tokens with logits, and few enough to be recorded."""
    if batch.first_logit or batch.wants_hidden or not batch.is_of_singles:
        return False
    return len(batch.pieces) <= MAX_AT_ONCE


def padded_drafts(ids: Sequence[int], batch: Batch) -> tuple[Sequence[int], Batch] | None:
    """Pad a pass over an MTP block to a captured size; return None if there is none.

    The first token that is only read, and the last token, are computed repeatedly; their keys and
    values are written to the same slots again.
    """
    n_read, n_wide = batch.first_logit, captured_rows(len(ids) - batch.first_logit)
    n = n_wide
    if n_read:
        n = next((size for size in DRAFT_ROWS if size >= n_read + n_wide), 0)
    if not n:
        return None
    before, after = n - n_read - n_wide, n_read + n_wide - len(ids)
    pieces = batch.pieces[:1] * before + batch.pieces + batch.pieces[-1:] * after
    wide = batch._replace(pieces=pieces, first_logit=n - n_wide)
    return [*[ids[0]] * before, *ids, *[ids[-1]] * after], wide
