"""A server with the demo model on a thread of this process, as a window would have it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from openai import OpenAI

from app.core.paths import demo_model
from app.server.async_engine import AsyncEngine
from app.server.context import ServerContext
from app.server.models import HeldModel
from app.server.settings import ServerSettings
from app.server.web.server import ServerThread
from engine import (
    AnswerRequest,
    Command,
    EngineHost,
    Failed,
    HostEvent,
    Load,
    LoadParams,
    ModelLoaded,
)
from engine.hosts.thread_host import ThreadHost

WAIT_S = 60.0

MakeHost = Callable[[Callable[[HostEvent], None]], EngineHost]


class EngineOnThread:
    """A model behind a host of this process, whose events go to the servers that are there.

    Args:
        make_host: starts the host, a real one with the demo model unless it is another.
        model: path of the model; None for the demo model.
        params: settings of the load.

    Attributes:
        cancelled: numbers of the commands that were cancelled.
        submitted: commands by number.
    """

    def __init__(
        self, make_host: MakeHost = ThreadHost, model: Path | None = None, **params: Any
    ) -> None:
        self.cancelled: list[int] = []
        self.submitted: dict[int, Command] = {}
        self.links: list[AsyncEngine] = []
        self._loaded: ModelLoaded | None = None
        self._is_loaded = threading.Event()
        self.host: EngineHost = make_host(self._on_event)
        self.host.submit(Load(LoadParams(str(model or demo_model()), **params)))
        assert self._is_loaded.wait(WAIT_S)
        assert self._loaded is not None

    @property
    def loaded(self) -> ModelLoaded:
        assert self._loaded is not None
        return self._loaded

    def submit(self, command: Command) -> int:
        number = self.host.submit(command)
        self.submitted[number] = command
        return number

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)
        self.host.cancel(number)

    def last_command(self) -> AnswerRequest:
        """Return the last answer that was asked for."""
        return [one for one in self.submitted.values() if isinstance(one, AnswerRequest)][-1]

    def close(self) -> None:
        assert self.host.close(WAIT_S)

    def _on_event(self, event: HostEvent) -> None:
        if isinstance(event.event, ModelLoaded | Failed) and not self._is_loaded.is_set():
            self._loaded = event.event if isinstance(event.event, ModelLoaded) else None
            self._is_loaded.set()
        for link in self.links:
            link.on_event(event)


class Served:
    """A server before an engine, in a `with` block.

    Attributes:
        address: where it listens, such as "http://127.0.0.1:40000".
        context: what it has and does; belongs to its thread.
    """

    def __init__(self, engine: EngineOnThread, **settings: Any) -> None:
        self._engine = engine
        self._settings = ServerSettings(**{"port": 0, **settings})
        self._async_engine = AsyncEngine(engine.submit, engine.cancel)
        self._thread = ServerThread(self._make_context, self._settings)
        self.context: ServerContext

    def __enter__(self) -> Self:
        self._engine.links.append(self._async_engine)
        self.address = self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.stop()

    def stop(self) -> None:
        """End the server, if it has not ended."""
        assert self._thread.stop()
        if self._async_engine in self._engine.links:
            self._engine.links.remove(self._async_engine)

    def client(self, **options: Any) -> OpenAI:
        """Return a client of the server, which does not try again."""
        key = self._settings.key or "none"
        given = {"base_url": f"{self.address}/v1", "api_key": key, "max_retries": 0, "timeout": 60}
        return OpenAI(**{**given, **options})

    def _make_context(self) -> ServerContext:
        self._async_engine.model = self._engine.loaded
        self.context = ServerContext(
            self._async_engine, HeldModel(self._async_engine), self._settings
        )
        return self.context
