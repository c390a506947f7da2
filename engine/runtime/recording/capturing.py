"""Captures of passes over single tokens on the devices of all ranks, and their replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.runtime.rank import Rank, Replay

if TYPE_CHECKING:
    from torch import Tensor

    from engine.backends.executor import RankExecutor
    from engine.backends.gpu.decode.rank_capture import CaptureTask
    from engine.model.forward.batch import Batch
    from engine.runtime.recording.one_shot_use import OneShotUse


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
