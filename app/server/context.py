"""What all requests share: the engine, the models, the limits, and the answering itself."""

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

RETRY_S = (1, 60)
"""Least and most seconds after which a refused client is asked to try again."""


class Admission:
    """Places of the engine, and the queue before them, in the order of arrival.

    Args:
        most_running: number of places.
        most_waiting: number of answers in the line, beyond which a request is refused.

    Attributes:
        n_running: number of taken places.
        n_waiting: number of answers in the line.
    """

    def __init__(self, most_running: int, most_waiting: int) -> None:
        self._most_running, self._most_waiting = most_running, most_waiting
        self.n_running = self.n_waiting = 0
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._seconds = 1.0  # that an answer takes, about

    @asynccontextmanager
    async def places(self, n: int) -> AsyncIterator[None]:
        """Take n places for the `async with` block, once they are free.

        Raises:
            Refusal: the line is too long.
        """
        n = min(n, self._most_running)
        if self._line or self.n_running + n > self._most_running:
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
        """Wait for n places, which are taken then."""
        if self.n_waiting + n > self._most_waiting:
            raise Refusal(
                429, f"{self.n_waiting} answers are waiting already.", "Try again later.",
                code="queue_full", retry_after_s=self.retry_after_s,
            )  # fmt: skip
        turn = n, asyncio.get_running_loop().create_future()
        self._line.append(turn)
        self.n_waiting += n
        try:
            await turn[1]
        except asyncio.CancelledError:
            if turn[1].done() and not turn[1].cancelled():
                self._give_back(n)  # it had its place already
            else:
                self._line.remove(turn)
                self._let_in()
            raise
        finally:
            self.n_waiting -= n

    @property
    def retry_after_s(self) -> int:
        """Seconds after which there may be room."""
        rounds = (self.n_waiting + self.n_running) / self._most_running
        return int(min(max(self._seconds * rounds, RETRY_S[0]), RETRY_S[1]))

    def _give_back(self, n: int) -> None:
        self.n_running -= n
        self._let_in()

    def _let_in(self) -> None:
        """Give free places to the first in the line."""
        while self._line and self.n_running + self._line[0][0] <= self._most_running:
            n, turn = self._line.popleft()
            if not turn.cancelled():
                self.n_running += n
                turn.set_result(None)


Labels = dict[str, object]


@dataclass(frozen=True, slots=True)
class MachinesState:
    """The other machines of a server, and the links between all.

    Attributes:
        machines: those that have joined.
        linked: measured links; None before the machines have met.
    """

    machines: tuple[JoinedMachine, ...] = ()
    linked: WiresMeasured | None = None

    def figures(self) -> Iterator[tuple[str, str, list[tuple[Labels, float]]]]:
        """Yield a name, a help text and values by labels for each kind of figure."""
        if not self.machines and self.linked is None:
            return
        yield "machines_joined", "Other machines that are there.", [({}, len(self.machines))]
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
        yield (
            "machine_load_ratio",
            "Load of other machines' devices, 0 to 1.",
            [
                (labels, state.load_percent / 100)
                for labels, state in states
                if state.load_percent is not None
            ],
        )
        linked = self.linked
        if linked is None:
            return
        links: list[tuple[Labels, WireSpeed]] = [
            ({"from": linked.names[wire.a], "to": linked.names[wire.b]}, wire)
            for wire in linked.wires
        ]
        yield (
            "machine_link_latency_seconds", "Time of a short message between machines.",
            [(labels, wire.mean_s) for labels, wire in links],
        )  # fmt: skip
        yield (
            "machine_link_bytes_per_second", "Speed of large tensors between machines.",
            [(labels, wire.bytes_per_s) for labels, wire in links],
        )  # fmt: skip


def wires_text(linked: WiresMeasured) -> str:
    """Return the links between machines for people, a line for each."""
    return "\n".join(
        f"{linked.names[wire.a]} - {linked.names[wire.b]}: {1e3 * wire.latency_s:.2f} ms, "
        f"{8 * wire.bytes_per_s / 1e6:,.0f} Mbit/s{_lossy(wire.latency_s, wire.mean_s)}"
        for wire in linked.wires
    )


UNEVEN = 1.5
"""Mean latency over the median from which a link is called uneven."""


def _lossy(latency_s: float, mean_s: float) -> str:
    if mean_s < UNEVEN * latency_s:
        return ""
    return f" (uneven: {1e3 * mean_s:.2f} ms on average; packets are lost, or the machine is busy)"


log = logging.getLogger(__name__)

MakeCommands = Callable[["ModelLoaded"], Sequence[AnswerRequest | ScoreTokens]]
"""What makes the commands of a request for the loaded model; it may raise a `Refusal`."""

AnswerEvents = AsyncGenerator[tuple[int, Event], None]
"""Events of some answers, each with its answer's index."""


class ServerContext:
    """The engine, models, limits and records that all requests share.

    Attributes:
        request_log: what is noted of requests.
        admission: places of the engine.
        spelling: the bytes of the model's tokens.
        cache: how full the model's KV cache is.
        parsing: held while a large body is parsed, as each such thread slows down all others.
        problem: returns why the model cannot answer for now, as a sentence that anyone may read;
            "" if it can, also if it is loaded first.
        machines: returns the other machines that compute the model, and the links between all.
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
        """Return the model that a request asks for.

        Raises:
            Refusal: there is no such model.
        """
        found = find_model(self.models, name)
        record.model = found.id
        return found

    async def run(self, record: RequestRecord, command: Command) -> Event:
        """Return the closing event of a command for the model that `find` has found.

        Raises:
            Refusal: the model cannot be loaded, or cannot answer the command.
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
        """Yield the events of a request's commands, each with its index, once there is room.

        Closing the iterator ends them. An answer that takes too long ends as if cancelled.

        Args:
            n: number of answers that are asked for.
            places: places in the request of what only the engine can check.

        Raises:
            Refusal: the request cannot be answered.
        """
        async with self.admission.places(n):
            model = await self.models.ready(record.model)
            commands = make(model)
            if self.settings.logs_prompts:
                for command in commands[:1]:
                    log.warning("request %d asks %r", record.number, command)
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
        """Return how an error of the engine is told, which may have cost the model."""
        if self.engine.model is not None:
            return refusal_of(error, places)
        models = self.models
        return refusal_of(error, places, back_s=models.back_s, lost_hint=models.lost_hint)
