"""Toy runtimes whose tokens are sampled on the device, and the events of their answers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine import ContextShifted, Event, Finished, PrefillProgress, SamplingParams, TokenText
from engine.backends.cpu.thread_comm import ThreadGroup
from engine.backends.executor import RankExecutor
from engine.backends.gpu.comm.communicator import DeviceGroup
from engine.backends.gpu.decode.token_stream import TokenStep, TokenStream
from engine.generation.generate import Generation
from engine.generation.scheduler import Scheduler
from engine.generation.sequence import TokenSequence
from engine.hardware.devices.topology import Routes
from engine.model.forward.recording import Captured
from engine.runtime.model_runner import ModelRunner
from engine.util.progress import never
from tests.helpers.reading import read
from tests.helpers.toy_runtime import Letters, SplitToy, ToyRuntime

PROMPT = [3, 14, 15, 9, 26, 5]


def toy(device: str, ahead: int | None = None, *, is_recurrent: bool = False) -> ToyRuntime:
    """Return a toy runtime; with `ahead`, its token stream runs that many steps ahead."""
    made = ToyRuntime(device, n_ctx=20, is_recurrent=is_recurrent)
    if ahead is not None:
        attach(made, ahead)
    made.reset()
    return made


def split_toy(n_ranks: int, device: str, **options: object) -> SplitToy:
    """Return a toy runtime on several ranks whose kernels exchange candidates."""
    runtime = SplitToy(n_ranks, device=device, n_ctx=20, **options)
    group = DeviceGroup([runtime.device] * n_ranks, Routes())
    members = tuple(range(n_ranks))

    def step(rank: int) -> TokenStep:
        toy, one_shot = runtime.toys[rank], group.one_shots.one_shot(rank, members)
        return TokenStep(
            toy.device, toy.hp.n_vocab, toy.token, toy.position,
            toy.begin, lambda: (runtime.sliced(rank), None), toy.can_rewind, runtime.own[rank],
            one_shot, lambda piece: [toy.states],
        )  # fmt: skip

    executor = new_executor(group.devices, group)
    made = TokenStream([step(rank) for rank in members], executor, group.one_shots, ahead=1)
    made.prepare()
    runtime.token_source = made
    runtime.reset()
    return runtime


def attach(runtime: ToyRuntime, ahead: int) -> TokenStream:
    """Give a runtime a prepared token stream."""
    made = TokenStream([step_of(runtime)], executor_of(runtime), ahead=ahead)
    made.prepare()
    runtime.token_source = made
    runtime.reset()
    return made


def step_of(runtime: ToyRuntime) -> TokenStep:
    return TokenStep(
        runtime.device, runtime.hp.n_vocab, runtime.token, runtime.position, runtime.begin,
        lambda: (runtime.compute(), None), runtime.can_rewind,
        states=lambda piece: [runtime.states],
    )  # fmt: skip


def executor_of(runtime: ToyRuntime) -> RankExecutor:
    return new_executor([runtime.device], ThreadGroup())


_executors: list[RankExecutor] = []


def new_executor(devices: Sequence[torch.device], group: ThreadGroup) -> RankExecutor:
    """Return an executor whose threads `close_executors` ends."""
    _executors.append(RankExecutor(devices, group))
    return _executors[-1]


def close_executors() -> None:
    while _executors:
        _executors.pop().close()


def request(
    runtime: ModelRunner, params: SamplingParams, *, tokenizer: Letters | None = None,
    prompt: Sequence[int] = PROMPT, is_cancelled: Callable[[], bool] = never, timed_every: int = 0,
) -> TokenSequence:  # fmt: skip
    generation = Generation(runtime.n_ctx, tokenizer, params, 2, timed_every)  # type: ignore[arg-type]
    return TokenSequence(generation.run(prompt), is_cancelled)


def answer(
    runtime: ModelRunner, params: SamplingParams, *, scheduler: Scheduler | None = None,
    **options: Any,
) -> list[Event]:  # fmt: skip
    """Return the events of an answer.

    Args:
        scheduler: what has computed other answers before; None for a new one.
        options: see `request`.
    """
    scheduler, asked = scheduler or Scheduler(runtime), request(runtime, params, **options)
    scheduler.submit(asked)
    return read(scheduler, asked)


def ids_of(events: Sequence[Event]) -> list[int]:
    return [i for event in events if isinstance(event, TokenText) for i in event.ids]


def told(events: Sequence[Event], *, is_first: bool = True) -> list[object]:
    """Return the part of an answer that must not depend on whether host or device samples.

    Args:
        is_first: whether nothing was cached; otherwise states may have been rewound further.
    """
    kept = [e for e in events if isinstance(e, TokenText | ContextShifted)]
    last = events[-1]
    assert isinstance(last, Finished)
    if not is_first:
        return [*kept, last.reason]
    return [e for e in events if isinstance(e, PrefillProgress)] + [*kept, last.reason, last.usage]


class Slow:
    """A slow device: replays happen on another thread, some time later."""

    def __init__(self, captured: Captured[torch.Tensor]) -> None:
        self._captured = captured
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.n_pending = 0
        threading.Thread(target=self._work, daemon=True).start()

    is_whole = True

    @property
    def result(self) -> torch.Tensor:
        return self._captured.result

    def replay(self) -> None:
        self.n_pending += 1
        self._wanted.put(True)

    def _work(self) -> None:
        while self._wanted.get():
            time.sleep(0.005)
            with torch.inference_mode():
                self._captured.replay()
            self.n_pending -= 1

    def end(self) -> None:
        self._wanted.put(False)
