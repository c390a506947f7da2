"""Records one token's kernel calls and torch operations, and replays them without the layers.

Each token runs the same operations on the same memory; only the contents differ.
`__torch_dispatch__` intercepts torch operations. Their results are kept alive, and a replayed
operation writes its result to the same memory again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.backends.cpu.kernels.running.call_log import CallLog, current_log
from engine.backends.cpu.kernels.running.replay import KernelReplay
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.backends.cpu.kernels.small.small_ops import SmallOps
from engine.backends.reference.dispatch import (
    DispatchMode,
    ReplayedOp,
    is_allocation,
    is_fit,
    is_view,
)
from engine.errors import LeftAlone
from engine.model.forward.recording import recording_to, refuse_replay

aten = torch.ops.aten

PAIRWISE: Mapping[Any, str] = {aten.add.Tensor: "add", aten.mul.Tensor: "multiply"}
"""Torch operations that our kernels replace, with the same bits, and record as kernel calls."""

Step = Callable[[], Any]
"""A recorded torch operation, to be called again."""

Arguments = Sequence[Any]
Options = Mapping[str, Any]


class Recorder(DispatchMode):
    """Recorder for one thread's operations inside `record`.

    Args:
        keeps: memory that kernels use, except what is allocated during the recording.
    """

    def __init__(self, pool: ThreadPool, keeps: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = CallLog()
        self._pool = pool
        self._arithmetic = SmallOps(pool)
        self._kept: list[object] = list(keeps)
        self._steps: list[Step | tuple[int, int]] = []
        self._n_added = 0
        self._last: Callable[[], Tensor | None] | None = None
        self._result: Tensor | None = None

    @property
    def refusal(self) -> str:
        """Reason why the recording cannot be replayed; "" if it can."""
        return self.log.refusal

    def record(self, compute: Callable[[], Tensor | None]) -> Tensor | None:
        """Compute a token and record it."""
        with self, recording_to(self.log):
            self._pool.log_calls(self.log.address)
            self.log.add_step = self._add
            try:
                result = compute()
            finally:
                self._pool.log_calls(0)
                self.log.add_step = None  # breaks a reference cycle
        return None if result is None else result.clone()

    def run_live(self, last: Callable[[], Tensor | None]) -> Tensor | None:
        """Run the token's last step, which replays also run."""
        self._pool.log_calls(0)
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
            y = self._arithmetic.pairwise(kernel, *args)
            if y is not None:
                self._kept.append(y)
                return y
        result = func(*args, **kwargs)
        self._kept.append(result)
        if not is_fit(func, args, result):
            refuse_replay(f"{func} depends on the values")
        elif func._schema.is_mutable:
            self._add(lambda: func(*args, **kwargs))
        elif not is_allocation(func) and not is_view(result, args):
            self._add(ReplayedOp(func, args, kwargs, result))
        return result

    def _add(self, step: Step) -> None:
        self._add_calls()
        self._steps.append(step)

    def _add_calls(self) -> None:
        if self.log.n_used > self._n_added:
            self._steps.append((self._n_added, self.log.n_used))
            self._n_added = self.log.n_used

    def recording(self, rank: int, keeps: Sequence[Tensor]) -> Recording | None:
        """Return the recording; None if it cannot be replayed (see `refusal`).

        Args:
            keeps: memory that replays need, except what was allocated during the recording.
        """
        self.log.check_room()
        if self.log.refusal:
            return None
        self._add_calls()
        replay = KernelReplay(self.log, self._pool)
        steps = [_calls(replay, *s) if isinstance(s, tuple) else s for s in self._steps]
        kept = [self._kept, self.log.kept, list(keeps)]
        return Recording(rank, steps, self._last, self._result, kept)


class Recording:
    """Recording of one token; each run computes the next token with the same operations.

    Args:
        steps: torch operations, and replays of the kernel calls between them.
        last: last step, which is called live and returns the token's logits.
        result: what `last` returned during the recording.
        kept: owners of the memory that the steps use.
    """

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
        """Replay the token and return the last step's result, in new memory.

        Raises:
            LeftAlone: another rank has failed.
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
