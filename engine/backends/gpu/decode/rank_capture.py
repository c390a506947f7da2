"""Captures one token's work on all of a model's ranks, and proves that replays give the same bits.

If kernels on several devices wait for each other, all ranks must have captured before any rank
launches, and nothing may be left to load. So there are five steps, and all ranks finish one before
the next: compute a token without waiting for each other, and drop the results; compute it; capture
it; launch all captures once without waiting for each other; replay them as they will be used, and
get the same bits as in the second step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.executor import RankOutOfMemory
from engine.backends.gpu.launch.graph import NotRepeatable
from engine.errors import CommError, Sentence
from engine.model.forward.recording import Captured

if TYPE_CHECKING:
    from engine.backends.executor import RankExecutor
    from engine.backends.gpu.comm.one_shot import OneShotGroups


class Unproven(NotRepeatable):
    """A capture whose replay is wrong, perhaps because several ranks' kernels interact in it."""


@dataclass(frozen=True, slots=True)
class CaptureTask:
    """One rank's work for a token, which is to be captured.

    Args:
        begin: writes the inputs that differ from token to token.
        compute: computes the token; its result always has the same size, or is always None.
        capture: captures `compute` for replays.
        states: tensors that `compute` changes.
    """

    begin: Callable[[], None]
    compute: Callable[[], Tensor | None]
    capture: Callable[[], Captured[Tensor | None]]
    states: Sequence[Tensor] = ()


class Recomputed(Captured[Tensor | None]):
    """Stand-in for a capture on a rank that captures nothing; a replay recomputes the token.

    Args:
        is_idle: whether the rank has no work, so that any thread may replay it.
    """

    def __init__(self, compute: Callable[[], Tensor | None], *, is_idle: bool = False) -> None:
        self.is_whole = is_idle
        self._compute = compute
        self.result = None

    def replay(self) -> None:
        self.result = self._compute()


class Replays:
    """All ranks' captures, which are replayed together."""

    def __init__(self, executor: RankExecutor, parts: Sequence[Captured[Tensor | None]]) -> None:
        self.parts = parts
        self._executor = executor

    @property
    def is_whole(self) -> bool:
        """Whether one thread may launch the replay on all devices."""
        return all(part.is_whole for part in self.parts)

    def replay(self) -> None:
        """Launch the replay on all ranks; for what it must not do, see `call_inline`."""
        each = self._executor.call_inline if self.is_whole else self._executor.run
        each(lambda rank: self.parts[rank].replay())


def capture_on_all(
    executor: RankExecutor, tasks: Sequence[CaptureTask], one_shots: OneShotGroups | None = None,
    *, waits: bool | None = None, agreed: Callable[[str], str] = lambda problem: problem,
) -> tuple[Replays, list[Tensor | None]]:  # fmt: skip
    """Compute a token on all ranks, and capture that work for replays.

    All machines with ranks must compute it the same number of times.

    Args:
        waits: whether the ranks' kernels wait for each other, also across machines; None to derive
            this from `one_shots`.
        agreed: given this machine's problem or "", returns any machine's problem.

    Returns:
        The captures, and each rank's result for the token.

    Raises:
        NotRepeatable: the work cannot be captured; states are restored. `Unproven` if it can, but
            its replay is wrong.
        EngineError: the token itself could not be computed, or a rank is lost.
    """
    if waits is None:
        waits = one_shots is not None and executor.has_gpus
    work = _Capturing(executor, tasks, one_shots, agreed)
    work.keep()
    if waits:
        work.rehearse()
    expected = executor.run(work.computed, is_watched=True)
    try:
        return work.replays(expected, waits=waits), expected
    except (CommError, RankOutOfMemory) as error:
        if executor.lost:
            raise
        executor.reset()
        executor.run(work.restore)
        kind = NotRepeatable if isinstance(error, RankOutOfMemory) else Unproven
        raise kind(str(error)) from error
    except NotRepeatable:
        executor.run(work.restore)
        raise


class _Capturing:
    """The steps of one capture; for the arguments, see `capture_on_all`."""

    def __init__(
        self, executor: RankExecutor, tasks: Sequence[CaptureTask],
        one_shots: OneShotGroups | None, agreed: Callable[[str], str],
    ) -> None:  # fmt: skip
        self._executor, self._tasks = executor, tasks
        self._one_shots, self._agreed = one_shots, agreed
        self._kept: Sequence[Sequence[Tensor]] = ()

    def keep(self) -> None:
        """Copy the states. Plans omit the copies, as passes for many answers change as many states.

        Raises:
            NotRepeatable: a device on any machine has no memory for the copies.
        """
        tasks, why = self._tasks, ""
        try:
            self._kept = self._executor.run(lambda rank: [x.clone() for x in tasks[rank].states])
        except RankOutOfMemory as error:
            why = str(error)
            self._executor.reset()
        if why := self._agreed(why):
            raise NotRepeatable(why)

    def restore(self, rank: int) -> None:
        for state, before in zip(self._tasks[rank].states, self._kept[rank], strict=True):
            state.copy_(before)

    def rehearse(self) -> None:
        """Compute the token while no kernel waits for another rank; restore the states.

        A device's first pass allocates memory and loads libraries; both wait for its kernels.
        """
        with self._without_waiting():
            self._executor.run(self.computed, is_watched=True)
            self._executor.wait()
        self._executor.run(self.restore)

    def _without_waiting(self) -> AbstractContextManager[object]:
        return nullcontext() if self._one_shots is None else self._one_shots.without_waiting()

    def computed(self, rank: int) -> Tensor | None:
        self._begin(rank)
        found = self._tasks[rank].compute()
        return None if found is None else found.clone()  # the next pass reuses the memory

    def replays(self, expected: Sequence[Tensor | None], *, waits: bool) -> Replays:
        """Capture on all ranks; return the captures once a replay gives the expected results.

        Raises:
            NotRepeatable, CommError: a capture or its proof failed.
        """
        executor = self._executor
        executor.make_room()  # for graphs; later, a device may wait for one that has not started
        found = Replays(executor, executor.run(self._captured))
        is_tape = self._one_shots is not None and found.is_whole  # it has already run once
        if waits or is_tape:
            executor.run(self._begin)
            with self._without_waiting():
                found.replay()
                executor.wait()
        executor.run(self._begin)
        found.replay()
        executor.wait()
        self._prove(expected, found)
        return found

    def _prove(self, expected: Sequence[Tensor | None], found: Replays) -> None:
        """Check that a replay has given the expected results on all machines.

        Raises:
            CommError: a kernel timed out waiting for the others.
            Unproven: results differ, or another machine has a problem.
        """
        parts = found.parts
        failure = None if self._one_shots is None else self._one_shots.problem()
        why = "" if failure is None else str(failure)
        if not all(self._executor.run(lambda rank: _same(expected[rank], parts[rank].result))):
            why = why or Sentence("a replayed token gives different results")
        why = self._agreed(why)
        if failure is not None:
            raise failure
        if why:
            raise Unproven(why)

    def _begin(self, rank: int) -> None:
        self.restore(rank)
        self._tasks[rank].begin()

    def _captured(self, rank: int) -> Captured[Tensor | None]:
        self._begin(rank)
        return self._tasks[rank].capture()


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
