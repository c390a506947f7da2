"""What all requests share: the engine, the models, the limits, and the answering itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from app.server.admission import Admission
from app.server.cache_gauge import CacheGauge
from app.server.ledger import Ledger, RequestRecord
from app.server.link import EngineLink
from app.server.machine_figures import MachinesState
from app.server.models import Models, OfferedModel, Spelling, find_model
from app.server.refusal import NO_PLACES, FieldPlaces, Refusal, refusal_of
from app.server.settings import ServerSettings
from engine import Command, EngineError, Event, Failed, Generate, ScoreTokens

if TYPE_CHECKING:
    from engine import ModelLoaded

log = logging.getLogger(__name__)

MakeCommands = Callable[["ModelLoaded"], Sequence[Generate | ScoreTokens]]
"""What makes the commands of a request for the loaded model; it may raise a `Refusal`."""

AnswerEvents = AsyncGenerator[tuple[int, Event], None]
"""Events of some answers, each with its answer's index."""


class Desk:
    """The engine, models, limits and records that all requests share.

    Attributes:
        ledger: what is noted of requests.
        admission: places of the engine.
        spelling: the bytes of the model's tokens.
        cache: how full the model's KV cache is.
        parsing: held while a large body is parsed, as each such thread slows down all others.
        problem: returns why the model cannot answer for now, as a sentence that anyone may read;
            "" if it can, also if it is loaded first.
        machines: returns the other machines that compute the model, and the links between all.
    """

    def __init__(self, link: EngineLink, models: Models, settings: ServerSettings) -> None:
        self.link, self.models, self.settings = link, models, settings
        self.ledger = Ledger()
        self.admission = Admission(settings.most_running, settings.most_waiting)
        self.spelling = Spelling()
        self.cache = CacheGauge(link)
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
            return await self.link.run(command)
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
            async with self.link.asking(commands) as events:
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
        if self.link.model is not None:
            return refusal_of(error, places)
        models = self.models
        return refusal_of(error, places, back_s=models.back_s, lost_hint=models.lost_hint)
