"""What all requests share: engine, models, limits and answering."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.server.async_engine import AsyncEngine, CacheGauge
from app.server.models import Models, OfferedModel, Spelling, find_model
from app.server.refusal import NO_PLACES, FieldPlaces, Refusal, refusal_of
from app.server.request_log import RequestLog, RequestRecord
from app.server.settings import ServerSettings
from engine import AnswerRequest, Command, EngineError, Event, Failed, ScoreTokens

if TYPE_CHECKING:
    from engine import DeviceSnapshot, JoinedMachine, ModelLoaded, WiresMeasured, WireSpeed

RETRY_S = (1, 60)  # range of Retry-After in seconds


class Admission:
    """Limit on concurrent answers, with a first-in-first-out queue.

    Args:
        most_running: maximum number of running answers.
        most_waiting: maximum length of the queue; further requests are refused.

    Attributes:
        n_running, n_waiting: numbers of running and of queued answers.
    """

    def __init__(self, most_running: int, most_waiting: int) -> None:
        self._most_running, self._most_waiting = most_running, most_waiting
        self.n_running = self.n_waiting = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._seconds = 1.0  # average duration of an answer

    @asynccontextmanager
    async def places(self, n: int) -> AsyncIterator[None]:
        """Wait until `n` places are free; reserve them for the `async with` block.

        Raises:
            Refusal: the queue is full.
        """
        n = min(n, self._most_running)
        if self._queue or self.n_running + n > self._most_running:
            await self._wait(n)
        else:
            self.n_running += n
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            yield
        finally:
            self._seconds += 0.2 * (loop.time() - start - self._seconds)
            self._give_back(n)

    async def _wait(self, n: int) -> None:
        if self.n_waiting + n > self._most_waiting:
            raise Refusal(
                429, "{n} answers are already waiting.", "Try again later.", code="queue_full",
                retry_after_s=self.retry_after_s, n=self.n_waiting,
            )  # fmt: skip
        turn = n, asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self.n_waiting += n
        try:
            await turn[1]
        except asyncio.CancelledError:
            if turn[1].done() and not turn[1].cancelled():
                self._give_back(n)  # the request was just admitted
            else:
                self._queue.remove(turn)
                self._admit()
            raise
        finally:
            self.n_waiting -= n

    @property
    def retry_after_s(self) -> int:
        """Estimated seconds until there is room in the queue."""
        rounds = (self.n_waiting + self.n_running) / self._most_running
        return int(min(max(self._seconds * rounds, RETRY_S[0]), RETRY_S[1]))

    def _give_back(self, n: int) -> None:
        self.n_running -= n
        self._admit()

    def _admit(self) -> None:
        while self._queue and self.n_running + self._queue[0][0] <= self._most_running:
            n, turn = self._queue.popleft()
            if not turn.cancelled():
                self.n_running += n
                turn.set_result(None)


Labels = dict[str, object]


@dataclass(frozen=True, slots=True)
class MachinesState:
    """A server's other machines and, once measured, the links between all its machines."""

    machines: tuple[JoinedMachine, ...] = ()
    linked: WiresMeasured | None = None

    def figures(self) -> Iterator[tuple[str, str, list[tuple[Labels, float]]]]:
        """Yield each metric's name, help text, and values with their labels."""
        if not self.machines and self.linked is None:
            return
        yield "machines_joined", "Other machines that have joined.", [({}, len(self.machines))]
        states: list[tuple[Labels, DeviceSnapshot]] = [
            ({"machine": machine.name, "device": state.device}, state)
            for machine in self.machines
            for state in machine.states
        ]
        yield (
            "machine_memory_used_bytes", "Memory in use on other machines' devices.",
            [(labels, state.used_bytes) for labels, state in states],
        )  # fmt: skip
        yield (
            "machine_memory_bytes", "Memory of other machines' devices.",
            [(labels, state.total_bytes) for labels, state in states],
        )  # fmt: skip
        loads = [(labels, state.load_percent) for labels, state in states]
        yield (
            "machine_load_ratio", "Load of other machines' devices, 0 to 1.",
            [(labels, percent / 100) for labels, percent in loads if percent is not None],
        )  # fmt: skip
        linked = self.linked
        if linked is None:
            return
        links: list[tuple[Labels, WireSpeed]] = [
            ({"from": linked.names[wire.a], "to": linked.names[wire.b]}, wire)
            for wire in linked.wires
        ]
        yield (
            "machine_link_latency_seconds", "Latency of a short message between machines.",
            [(labels, wire.mean_s) for labels, wire in links],
        )  # fmt: skip
        yield (
            "machine_link_bytes_per_second", "Bandwidth for large tensors between machines.",
            [(labels, wire.bytes_per_s) for labels, wire in links],
        )  # fmt: skip


def wires_text(linked: WiresMeasured) -> str:
    """Format the links between machines, one line per link."""
    return "\n".join(
        f"{linked.names[wire.a]} - {linked.names[wire.b]}: {1e3 * wire.latency_s:.2f} ms, "
        f"{8 * wire.bytes_per_s / 1e6:,.0f} Mbit/s{_lossy(wire.latency_s, wire.mean_s)}"
        for wire in linked.wires
    )


UNEVEN = 1.5  # ratio of mean to median latency at which a link counts as uneven


def _lossy(latency_s: float, mean_s: float) -> str:
    if mean_s < UNEVEN * latency_s:
        return ""
    return f" (uneven: {1e3 * mean_s:.2f} ms on average; packets are lost, or the machine is busy)"


log = logging.getLogger(__name__)

MakeCommands = Callable[["ModelLoaded"], Sequence[AnswerRequest | ScoreTokens]]
"""Creates a request's commands for the loaded model; may raise a `Refusal`."""

AnswerEvents = AsyncGenerator[tuple[int, Event], None]
"""Events of some answers, each with the answer's index."""


class ServerContext:
    """The engine, models, limits and log that all requests share.

    Attributes:
        spelling: the bytes of models' tokens.
        cache: KV cache usage.
        parsing: lock held while a large body is parsed, since each parsing thread slows all others.
        problem: returns why the model cannot answer now, without confidential details; "" if it
            can answer, possibly after a load.
        machines: returns the machines that run the model together.
    """

    def __init__(self, async_engine: AsyncEngine, models: Models, settings: ServerSettings) -> None:
        self.engine, self.models, self.settings = async_engine, models, settings
        self.request_log = RequestLog()
        self.admission = Admission(settings.most_running, settings.most_waiting)
        self.spelling = Spelling()
        self.cache = CacheGauge(async_engine)
        self.parsing = asyncio.Lock()
        self.problem: Callable[[], str] = models.problem
        self.machines: Callable[[], MachinesState] = MachinesState

    def find(self, name: str, record: RequestRecord) -> OfferedModel:
        """Return the model for a request and record its id.

        Raises:
            Refusal: there is no such model.
        """
        model = find_model(self.models, name)
        record.model = model.id
        return model

    async def run(self, record: RequestRecord, command: Command) -> Event:
        """Run a command on the model that `find` returned; return its closing event.

        Raises:
            Refusal: the model cannot be loaded, or the command failed.
        """
        await self.models.ready(record.model)
        try:
            return await self.engine.run(command)
        except EngineError as error:
            raise self._refusal(error, NO_PLACES) from None

    async def answers(
        self, record: RequestRecord, n: int, make: MakeCommands,
        places: FieldPlaces = NO_PLACES,
    ) -> AnswerEvents:  # fmt: skip
        """Run a request's commands once there is room; yield their events with command indices.

        Closing the generator cancels the commands. Answers that take too long end as if cancelled.

        Args:
            n: number of answers.
            places: where the request has fields that only the engine can validate.

        Raises:
            Refusal: the request failed.
        """
        async with self.admission.places(n):
            model = await self.models.ready(record.model)
            commands = make(model)
            if self.settings.logs_prompts:
                for command in commands[:1]:
                    log.warning("request %d: %r", record.number, command)
            async with self.engine.events_of(commands) as events:
                loop = asyncio.get_running_loop()
                timer = loop.call_later(self.settings.most_answer_s, events.end)
                try:
                    async for index, event in events:
                        if isinstance(event, Failed):
                            raise self._refusal(event.error, places)
                        record.note(event)
                        yield index, event
                finally:
                    timer.cancel()

    def _refusal(self, error: EngineError, places: FieldPlaces) -> Refusal:
        if self.engine.model is not None:
            return refusal_of(error, places)
        models = self.models
        return refusal_of(error, places, back_s=models.back_s, lost_hint=models.lost_hint)
