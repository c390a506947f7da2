"""A remote model for the command line, used instead of `engine.Model`."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Final

from app.core import paths
from app.core.translation import tr
from app.remote.client.address import KeyStore, RemoteAddress, cleaned_key, parse_url
from app.remote.client.host import RemoteHost
from engine import (
    AnswerRequest,
    Command,
    EngineError,
    Event,
    Failed,
    Fallback,
    Finished,
    HostEvent,
    Load,
    LoadParams,
    ModelInfo,
    ModelLoaded,
    TokenText,
)

LOOK_S: Final = 0.1  # interval in seconds between checks for cancellation
MAX_KEY: Final = 1 << 16


class RemoteModel:
    """A remote model with the parts of `engine.Model`'s interface that subcommands use.

    Raises:
        EngineError: the request failed, or the server has no such model.
    """

    def __init__(self, address: RemoteAddress, key: str = "") -> None:
        # not a SimpleQueue, since signals may make it forget its timeout
        self._events: queue.Queue[HostEvent] = queue.Queue()
        self._host = RemoteHost(self._events.put, lambda _: key)
        self.warnings: tuple[str, ...] = ()
        self.fallbacks: tuple[Fallback, ...] = ()
        try:
            *_, loaded = self._do(Load(LoadParams(address.path)), lambda: False)
        except BaseException:
            self._host.close()
            raise
        assert isinstance(loaded, ModelLoaded), "the closing event of a load"
        self.info: ModelInfo = loaded.info

    def __enter__(self) -> RemoteModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._host.close()

    def answer(self, request: AnswerRequest, is_cancelled: Callable[[], bool]) -> Iterator[Event]:
        """Yield an answer's events, without token ids.

        Raises:
            EngineError: the server failed.
        """
        for event in self._do(request, is_cancelled):
            yield replace(event, ids=()) if isinstance(event, TokenText) else event

    def _do(self, command: Command, is_cancelled: Callable[[], bool]) -> Iterator[Event]:
        number = self._host.submit(command)
        while True:
            try:
                received = self._events.get(timeout=LOOK_S)
            except queue.Empty:
                if is_cancelled():
                    self._host.cancel(number)
                continue
            if received.command_id != number:
                continue
            if isinstance(received.event, Failed):
                raise received.event.error
            yield received.event
            if isinstance(received.event, Finished | ModelLoaded):
                return
            if is_cancelled():
                self._host.cancel(number)


def server_model(url: str, model: str, key_file: str | None) -> RemoteModel:
    """Connect to the model that the command-line options name.

    Raises:
        EngineError: the request failed, or the server has no such model.
    """
    address = replace(parse_url(url), model=model)
    if key_file is not None:
        return RemoteModel(address, _key_in(key_file))
    return RemoteModel(address, KeyStore(paths.api_keys_file()).get(address))


def _key_in(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            key = cleaned_key(file.readline(MAX_KEY))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else tr("it is not text")
        raise EngineError(tr("{name} cannot be read: {why}.").format(name=path, why=why)) from None
    if not key:
        raise EngineError(tr("The first line of {name} has no key.").format(name=path))
    return key
