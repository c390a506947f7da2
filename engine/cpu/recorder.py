"""Computing one token, recorded: the kernels' calls and torch's operations, without the layers.

A token takes the same operations as the one before, on the same memory: what differs stands in that
memory. So they are recorded once. Operations of torch come here by `__torch_dispatch__`; what they
make is kept, so that it stays where it is, and repeating one writes its result there again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.cpu.kernels.call_log import CallLog, current_log
from engine.cpu.kernels.replay import KernelReplay
from engine.cpu.kernels.small_ops import SmallOps
from engine.cpu.kernels.team import Team
from engine.errors import LeftAlone
from engine.forward.recording import recording_to, refuse_replay
from engine.ops.replay import Again, Watching, is_allocation, is_fit, is_view

aten = torch.ops.aten

PAIRWISE: Mapping[Any, str] = {aten.add.Tensor: "add", aten.mul.Tensor: "multiply"}
"""What is done by a kernel instead, where one serves; the bits are the same."""

Step = Callable[[], Any]
Arguments = Sequence[Any]
Options = Mapping[str, Any]


class Recorder(Watching):
    """Records what one thread computes while it is entered.

    Args:
        keeps: memory that kernels use beside what is allocated meanwhile.
    """

    def __init__(self, team: Team, keeps: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = CallLog()
        self._team = team
        self._arithmetic = SmallOps(team)
        self._kept: list[object] = list(keeps)
        self._steps: list[Step | tuple[int, int]] = []
        self._n_cut = 0
        self._last: Callable[[], Tensor | None] | None = None
        self._result: Tensor | None = None

    @property
    def refusal(self) -> str:
        """Why the recording cannot be replayed; "" if it can."""
        return self.log.refusal

    def record(self, compute: Callable[[], Tensor | None]) -> Tensor | None:
        """Compute a token and record it."""
        with self, recording_to(self.log):
            self._team.log_calls(self.log.address)
            try:
                result = compute()
            finally:
                self._team.log_calls(0)
        return None if result is None else result.clone()

    def live(self, last: Callable[[], Tensor | None]) -> Tensor | None:
        """Do as the last step what is not recorded but called each time."""
        self._team.log_calls(0)
        self._last = last
        with recording_to(None):
            self._result = last()
        return self._result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Arguments = (), kwargs: Options | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if current_log() is None:
            return func(*args, **kwargs)
        if self._last:
            refuse_replay("something follows the last step")
        if (kernel := PAIRWISE.get(func)) and not kwargs and _are_tensors(args):
            made = self._arithmetic.pairwise(kernel, *args)
            if made is not None:
                self._kept.append(made)
                return made
        result = func(*args, **kwargs)
        self._kept.append(result)
        if not is_fit(func, args, result):
            refuse_replay(f"{func} depends on what it computes with")
        elif func._schema.is_mutable:
            self._add(lambda: func(*args, **kwargs))
        elif not is_allocation(func) and not is_view(result, args):
            self._add(Again(func, args, kwargs, result))
        return result

    def _add(self, step: Step) -> None:
        self._cut()
        self._steps.append(step)

    def _cut(self) -> None:
        """End the calls of kernels that were noted since the last step."""
        if self.log.n_used > self._n_cut:
            self._steps.append((self._n_cut, self.log.n_used))
            self._n_cut = self.log.n_used

    def recording(self, rank: int, keeps: Sequence[Tensor]) -> Recording | None:
        """What was recorded; None if it cannot be repeated: `log.refusal` says why."""
        self.log.check_room()
        if self.log.refusal:
            return None
        self._cut()
        replay = KernelReplay(self.log, self._team)
        steps = [_calls(replay, *s) if isinstance(s, tuple) else s for s in self._steps]
        kept = [self._kept, self.log.kept, list(keeps)]
        return Recording(rank, steps, self._last, self._result, kept)


class Recording:
    """Computes one more token as one was computed before."""

    def __init__(
        self, rank: int, steps: Sequence[Step], last: Callable[[], Tensor | None] | None,
        result: Tensor | None, kept: object,
    ) -> None:  # fmt: skip
        self._rank = rank
        self._steps = steps
        self._last = last
        self._result = result
        self._kept = kept

    def run(self) -> Tensor | None:
        """What the last step gives, in memory of its own.

        Raises:
            LeftAlone: another rank is gone.
        """
        try:
            for step in self._steps:
                step()
        except threading.BrokenBarrierError:
            raise LeftAlone(self._rank) from None
        result = self._last() if self._last else None
        return result.clone() if result is not None and result is self._result else result


def _calls(replay: KernelReplay, start: int, stop: int) -> Step:
    return lambda: replay.run(start, stop)


def _are_tensors(args: Sequence[Any]) -> bool:
    return len(args) == 2 and all(isinstance(x, Tensor) for x in args)
