"""Passes over single tokens by their number of tokens: which are recorded, and when."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.errors import CommError
from engine.model.forward.batch import (
    CAPTURED_ROWS,
    GUESSING_ROWS,
    MOST_AT_ONCE,
    MOST_GUESSES_CAPTURED,
    MOST_RECORDED,
    Batch,
    PassSize,
    captured_rows,
)
from engine.runtime.passes import micro_batches
from engine.runtime.rank import FEW_ROWS, Captures, Rank, Replay, rehearsed_rows

if TYPE_CHECKING:
    from torch import Tensor

    from engine.backends.executor import RankExecutor
    from engine.backends.gpu.comm.one_shot import OneShotGroups
    from engine.backends.gpu.decode.rank_capture import CaptureTask
    from engine.decoding.sampling.sampler import Logits
    from engine.runtime.passes.prompt_batches import PromptBatches
    from engine.runtime.rank import GuessSize

MOST_GUESSES_RECORDED = 6
"""Largest number of sizes of passes over an MTP block that are kept recorded."""


def are_captured(ranks: Sequence[Rank]) -> bool:
    """Return whether any rank captures passes over single tokens, those of other machines too."""
    return any(rank.backend.captures or rank.elsewhere.some for rank in ranks)


def captures_of(ranks: Sequence[Rank]) -> Captures:
    """Return which ranks capture passes over single tokens, those of other machines included."""
    return Captures(
        some=are_captured(ranks),
        all=all((r.is_idle or r.backend.captures) and r.elsewhere.all for r in ranks),
    )


def n_until_recorded(ranks: Sequence[Rank]) -> int:
    """Return the number of passes of one size up to the recorded one, which is included.

    The first one allocates what is kept. A capture computes its tokens without recording first, so
    there it can be the first one.
    """
    return 1 if are_captured(ranks) else 2


class RecordedSizes:
    """Numbers of tokens of the passes that are recorded; the recordings lie in the ranks.

    Attributes:
        n_single: number of passes over single tokens since `clear`, by their size.
        n_guesses: number of passes over MTP blocks since then, by their size.
    """

    def __init__(self) -> None:
        self.n_single = Counter[PassSize]()
        self.n_guesses: Counter[GuessSize] = Counter()
        self._refused: set[PassSize] = set()
        self._refused_guesses: set[GuessSize] = set()
        self._used: list[PassSize] = []  # sizes beside one, the one used last at the end

    def has(self, size: PassSize, ranks: Sequence[Rank]) -> bool:
        """Return whether all ranks have a recording of a size."""
        return all(size in rank.recordings for rank in ranks)

    def is_due(self, size: PassSize, ranks: Sequence[Rank]) -> bool:
        """Return whether a pass of a size, counted already, is to be recorded."""
        return self.n_single[size] == n_until_recorded(ranks) and size not in self._refused

    def note(self, size: PassSize, ranks: Sequence[Rank]) -> None:
        """Note that a recording is used, and drop the one on CPUs that was not used for longest."""
        if size == 1 or are_captured(ranks) or not self.has(size, ranks):
            return
        self._used = [*(used for used in self._used if used != size), size]
        if len(self._used) > MOST_RECORDED:
            dropped = self._used.pop(0)
            self.n_single[dropped] = 0
            for rank in ranks:
                rank.recordings.pop(dropped, None)

    def make_room_for_guesses(self, ranks: Sequence[Rank], block: int) -> None:
        """Drop a block's oldest recordings if there is to be one more than are kept."""
        found = (size for rank in ranks for size in rank.guesses if size[0] == block)
        sizes = list(dict.fromkeys(found))
        for size in sizes[: max(0, len(sizes) + 1 - MOST_GUESSES_RECORDED)]:
            self.n_guesses[size] = 0
            for rank in ranks:
                rank.guesses.pop(size, None)

    def may_capture_guesses(self, size: GuessSize, ranks: Sequence[Rank]) -> bool:
        """Return whether passes over MTP blocks of a size are captured, or may be."""
        known = {found for rank in ranks for found in rank.guesses if found[0] == size[0]}
        has_room = size in known or len(known) < MOST_GUESSES_CAPTURED
        return has_room and size not in self._refused_guesses

    def refuse_guesses(self, size: GuessSize) -> None:
        """Note that passes over MTP blocks of a size cannot be captured, ever."""
        self._refused_guesses.add(size)

    def refuse(self, size: PassSize) -> None:
        """Note that passes of a size cannot be recorded, ever."""
        self._refused.add(size)

    def clear(self, ranks: Sequence[Rank]) -> None:
        """Drop all recordings, and count anew."""
        self.n_single.clear()
        self.n_guesses.clear()
        self._used.clear()
        for rank in ranks:
            rank.recordings.clear()
            rank.guesses.clear()


def size_of(batch: Batch, ranks: Sequence[Rank]) -> PassSize:
    """Return the size by which the recordings of passes like one over single tokens are kept."""
    return batch.captured_size if are_captured(ranks) else len(batch.pieces)


def may_repeat(batch: Batch, ranks: Sequence[Rank], *, can_rewind: bool) -> bool:
    """Return whether a pass computes single tokens as a recording of so many would.

    Args:
        can_rewind: whether there are no recurrent states, which CPUs beside GPUs would change once
            more for each row that `padded` adds.
    """
    pieces = batch.pieces
    if batch.first_logit or batch.wants_hidden or not batch.is_of_singles:
        return False
    if len(pieces) > MOST_AT_ONCE:
        return False
    if can_rewind or not are_captured(ranks):
        return True
    return len(pieces) in CAPTURED_ROWS or captures_of(ranks).all


def padded(ids: Sequence[int], batch: Batch, ranks: Sequence[Rank]) -> tuple[Sequence[int], Batch]:
    """Return single tokens as a size that is captured, by computing the last one repeatedly.

    Its keys and values are written to the same place again; recurrent states change once, see
    `engine.backends.gpu.page_tables`.
    """
    n_more = captured_rows(len(ids)) - len(ids) if are_captured(ranks) else 0
    if not n_more:
        return ids, batch
    pieces = batch.pieces + batch.pieces[-1:] * n_more
    return [*ids, *[ids[-1]] * n_more], batch._replace(pieces=pieces)


def padded_guesses(ids: Sequence[int], batch: Batch) -> tuple[Sequence[int], Batch] | None:
    """Return tokens of a pass over an MTP block as a size that is captured; None if there is none.

    The first token that is only read, and the last one, are computed repeatedly: their keys and
    values are written to the same place again.
    """
    n_read, wanted = batch.first_logit, captured_rows(len(ids) - batch.first_logit)
    n = wanted
    if n_read:
        n = next((size for size in GUESSING_ROWS if size >= n_read + wanted), 0)
    if not n:
        return None
    before, behind = n - n_read - wanted, n_read + wanted - len(ids)
    pieces = batch.pieces[:1] * before + batch.pieces + batch.pieces[-1:] * behind
    wide = batch._replace(pieces=pieces, first_logit=n - wanted)
    return [*[ids[0]] * before, *ids, *[ids[-1]] * behind], wide


log = logging.getLogger(__name__)


class KernelMeetings(NamedTuple):
    """Whether kernels of a model's ranks meet, in one-shot all-reduces.

    Attributes:
        some: whether any do.
        wait: whether they wait for each other, as on cards. Then passes of a size are computed once
            before without waiting, see `ModelRunner.rehearse`.
    """

    some: bool
    wait: bool


class OneShotUse:
    """The one-shot all-reduces of a model's ranks, while they are in use.

    Args:
        has_gpus: whether ranks compute on GPUs.

    Attributes:
        control: the all-reduces; None if there are none, or retired.
    """

    def __init__(self, control: OneShotGroups | None, *, has_gpus: bool = False) -> None:
        self.control = control
        self._has_gpus = has_gpus
        self._has_tried_again = False
        self._of_machines: KernelMeetings | None = None
        self._agreed: Callable[[str], str] | None = None

    @property
    def here(self) -> KernelMeetings:
        """Meetings of this machine's ranks."""
        return KernelMeetings(self.control is not None, self.control is not None and self._has_gpus)

    @property
    def meetings(self) -> KernelMeetings:
        """Meetings of all machines' ranks, the same on all machines."""
        return self.here if self._of_machines is None else self._of_machines

    def join(self, meetings: KernelMeetings, agreed: Callable[[str], str]) -> None:
        """Do as other machines do from now on, whose ranks take part in each pass.

        Args:
            meetings: meetings of all machines' ranks.
            agreed: tells all machines what is wrong here, "" if nothing is; returns what is wrong
                on the first machine where anything is.
        """
        self._of_machines, self._agreed = meetings, agreed

    def agreed(self, problem: str) -> str:
        """Return what is wrong on the first machine where anything is; called on all of them."""
        return problem if self._agreed is None else self._agreed(problem)

    def without_waiting(self) -> AbstractContextManager[object]:
        """Return a context in which no kernel waits for another rank."""
        return nullcontext() if self.control is None else self.control.without_waiting()

    def may_try_again(self, why: str) -> bool:
        """Return whether to repeat what failed because kernels of ranks meet, or might have.

        The first time it is repeated as it was: what had to be allocated or loaded is there by
        then. The second time one-shot all-reduces are retired.
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
        """Let ranks use other collectives, on all machines."""
        if self.control is not None:
            self.control.retire(why)
            self.control = None
        if self._of_machines is not None:
            self._of_machines = KernelMeetings(some=False, wait=False)

    def note_success(self) -> None:
        """Note that kernels have met: the next failure is a first one again."""
        self._has_tried_again = False


def captured_on(
    executor: RankExecutor, meeting: OneShotUse, ranks: Sequence[Rank],
    task: Callable[[Rank], CaptureTask],
) -> tuple[Sequence[Replay], Sequence[Tensor | None]]:  # fmt: skip
    """Compute each rank's task and capture it; return the captures, and what was computed.

    Raises:
        NotRepeatable: see `engine.backends.gpu.decode.rank_capture.capture_on_all`.
    """
    from engine.backends.gpu.decode.rank_capture import Unproven, capture_on_all

    while True:
        tasks = [task(rank) for rank in ranks]
        try:
            found, results = capture_on_all(
                executor, tasks, meeting.control, waits=meeting.meetings.wait, agreed=meeting.agreed
            )  # fmt: skip
        except Unproven as error:
            if not meeting.may_try_again(str(error)):
                raise
        else:
            meeting.note_success()
            return [Replay(part) for part in found.parts], results


def repeated_on(
    executor: RankExecutor, ranks: Sequence[Rank], replays: Sequence[Replay], ids: Sequence[int],
    batch: Batch,
) -> Sequence[Tensor | None]:  # fmt: skip
    """Replay what each rank has captured, for other tokens; return each rank's result."""

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
        executor.wait()  # all devices may take part in the logits of one
    return [replay.result for replay in replays]


class ColdRunner(Protocol):
    """A runner of passes that have not been computed before; see `ModelRunner`."""

    ranks: list[Rank]
    executor: RankExecutor
    batches: PromptBatches
    meeting: OneShotUse
    n_ctx: int
    n_batch: int

    @property
    def has_kernels(self) -> bool:
        """Whether any rank has kernels whose calls can be recorded or captured."""
        ...

    def compute(self, ids: Sequence[int], batch: Batch) -> Logits:
        """Run the rows of a batch."""
        ...

    def rehearse(self, n: int) -> bool:
        """Compute n tokens while no kernel waits for another rank, if any could."""
        ...


def warm_up(runner: ColdRunner) -> None:
    """Compile, record and measure now, so that the first prompt and token do not wait for it.

    If the ranks' kernels wait for each other in vain, all is computed once more, then without
    one-shot all-reduces.

    Raises:
        EngineError: a pass failed otherwise.
    """
    if not runner.has_kernels:
        return
    while True:
        try:
            _compute_once(runner)
        except CommError as error:
            if runner.executor.lost or not runner.meeting.may_try_again(str(error)):
                raise
        else:
            runner.meeting.note_success()
            return


def _compute_once(runner: ColdRunner) -> None:
    """Compute the passes of `warm_up` once."""
    for _ in range(n_until_recorded(runner.ranks)):
        runner.compute([0], Batch.of_one(0, 1, 0))
    compiles = any(rank.backend.compiles for rank in runner.ranks)
    if compiles or runner.meeting.meetings.wait:  # perhaps on other machines alone
        most = min(runner.n_ctx, runner.n_batch)
        for n in rehearsed_rows(most):
            is_done = runner.rehearse(n) and n > FEW_ROWS  # no kernel of large sums waits
            if not is_done:
                runner.compute([0] * n, Batch.of_one(0, n, n - 1))
        _try_micro_batches(runner, min(most, micro_batches.TRIED_ROWS))
    for rank in runner.ranks:
        rank.backend.prepare()


def _try_micro_batches(runner: ColdRunner, n: int) -> None:
    """Measure whether batches of n tokens take less time in micro-batches; keep the answer."""
    if n < micro_batches.LEAST_ROWS or not any(rank.micro_batches for rank in runner.ranks):
        return

    def compute(in_micro_batches: bool) -> None:
        runner.batches.in_micro_batches = in_micro_batches
        runner.compute([0] * n, Batch.of_one(0, n, n - 1))

    runner.batches.in_micro_batches = micro_batches.micro_batches_pay(compute)
