"""Has all ranks of a model capture what they do for a token, and proves that it can be replayed.

On devices whose kernels wait for each other every rank must have captured before one is started,
and nothing may have to be loaded then. So there are four steps, each of which all ranks have taken
before the next one: a token is computed without a capture; all capture; all are started once
without waiting for each other; and then as they will be, which must give the first one's bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.errors import CommError
from engine.gpu.launch.graph import Captured, NotRepeatable
from engine.parallel.executor import Full

if TYPE_CHECKING:
    from engine.forward.communicator import Group
    from engine.gpu.decode.sampling import WordExchange
    from engine.parallel.executor import Crew


class Unproven(NotRepeatable):
    """What was captured does not do what it should, perhaps because kernels meet in it."""


class OneShotControl(Protocol):
    """What kernels of a model's ranks meet by, as long as nothing was found against it."""

    def without_waiting(self) -> contextlib.AbstractContextManager[object]:
        """What is started meanwhile waits for no other rank; its sums are of no use."""
        ...

    def problem(self) -> CommError | None:
        """What a kernel has met with, such as a rank that did not come; None if all is well.

        It waits for no device.
        """
        ...

    def one_shot(self, rank: int, group: Group) -> WordExchange | None:
        """A rank's end in a group, by which small messages go too; None where there is none."""
        ...

    def retire(self, why: str) -> None:
        """Let the ranks meet in another way from now on."""
        ...


@dataclass(frozen=True, slots=True)
class Take:
    """What one rank does for a token.

    Args:
        begin: writes what differs from token to token.
        compute: its result always lies in the same number of elements, or is None always.
        capture: makes of `compute` what can be replayed.
        states: change whenever it is computed.
    """

    begin: Callable[[], None]
    compute: Callable[[], Tensor | None]
    capture: Callable[[], Captured[Tensor | None]]
    states: Sequence[Tensor] = ()


class Recomputed:
    """For a rank that captures nothing: it computes anew each time.

    Args:
        is_idle: it does nothing at all, so it does not matter where.
    """

    def __init__(self, compute: Callable[[], Tensor | None], *, is_idle: bool = False) -> None:
        self.is_whole = is_idle
        self._compute = compute
        self._result: Tensor | None = None

    @property
    def result(self) -> Tensor | None:
        return self._result

    def replay(self) -> None:
        self._result = self._compute()


class Replays:
    """What all ranks have captured."""

    def __init__(self, crew: Crew, parts: Sequence[Captured[Tensor | None]]) -> None:
        self.parts = parts
        self._crew = crew

    @property
    def is_whole(self) -> bool:
        """One thread may start it on all devices."""
        return all(part.is_whole for part in self.parts)

    def replay(self) -> None:
        """Start it on all of them; see `Crew.here` for what that may not wait for."""
        each = self._crew.here if self.is_whole else self._crew.run
        each(lambda rank: self.parts[rank].replay())


def capture_on_all(
    crew: Crew, takes: Sequence[Take], one_shots: OneShotControl | None = None
) -> tuple[Replays, list[Tensor | None]]:
    """Capture what each rank does for a token, which is computed with that.

    Returns:
        What can be replayed, and the token's results.

    Raises:
        NotRepeatable: it cannot be; states are as before. `Unproven` if it can, to no avail.
        EngineError: the token could not even be computed, or a rank is lost.
    """
    work = _Capturing(crew, takes)
    expected = crew.run(work.computed, is_watched=True)
    try:
        return work.replays(expected, one_shots), expected
    except (CommError, Full) as error:
        if crew.lost:
            raise
        crew.begin_anew()
        crew.run(work.restore)
        kind = NotRepeatable if isinstance(error, Full) else Unproven
        raise kind(str(error)) from error
    except NotRepeatable:
        crew.run(work.restore)
        raise


class _Capturing:
    """The steps of one capture."""

    def __init__(self, crew: Crew, takes: Sequence[Take]) -> None:
        self._crew, self._takes = crew, takes
        self._kept = crew.run(lambda rank: [state.clone() for state in takes[rank].states])

    def restore(self, rank: int) -> None:
        """Have the states from before again."""
        for state, before in zip(self._takes[rank].states, self._kept[rank], strict=True):
            state.copy_(before)

    def computed(self, rank: int) -> Tensor | None:
        """What the token gives, in memory of its own."""
        self._begin(rank)
        found = self._takes[rank].compute()
        return None if found is None else found.clone()

    def replays(
        self, expected: Sequence[Tensor | None], one_shots: OneShotControl | None
    ) -> Replays:
        """What gives the same, as was proven.

        Raises:
            NotRepeatable, CommError: nothing can be said for it.
        """
        crew = self._crew
        crew.make_room()  # for graphs; later some devices may wait for others that have not begun
        found = Replays(crew, crew.run(self._captured))
        if one_shots is not None and (found.is_whole or crew.has_gpus):  # a tape has been started
            crew.run(self._begin)
            with one_shots.without_waiting():
                found.replay()
                crew.wait()
        crew.run(self._begin)
        found.replay()
        crew.wait()
        problem = None if one_shots is None else one_shots.problem()
        if problem is not None:
            raise problem
        if not all(crew.run(lambda rank: _same(expected[rank], found.parts[rank].result))):
            raise Unproven("a token that is repeated gives something else")
        return found

    def _begin(self, rank: int) -> None:
        self.restore(rank)
        self._takes[rank].begin()

    def _captured(self, rank: int) -> Captured[Tensor | None]:
        self._begin(rank)
        return self._takes[rank].capture()


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two results, F32, have the same bits."""
    if a is None or b is None:
        return a is b
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
