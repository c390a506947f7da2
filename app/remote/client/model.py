"""A remote model for the command line, in the place of one that this process has loaded."""

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

LOOK_S: Final = 0.1
"""Seconds between two looks whether a person has pressed Ctrl+C."""

MAX_KEY: Final = 1 << 16


class RemoteModel:
    """A model of a server, with what subcommands ask of `engine.Model`.

    Args:
        key: its API key; "" for none.

    Attributes:
        info: what is known of it.
        warnings, fallbacks: none.

    Raises:
        EngineError: the server cannot be asked, or has no such model.
    """

    def __init__(self, address: RemoteAddress, key: str = "") -> None:
        # no SimpleQueue: a signal may make that forget its timeout
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
        """Yield the events of an answer; no text has ids of its tokens.

        Raises:
            EngineError: the server fails.
        """
        for event in self._do(request, is_cancelled):
            yield replace(event, ids=()) if isinstance(event, TokenText) else event

    def _do(self, command: Command, is_cancelled: Callable[[], bool]) -> Iterator[Event]:
        number = self._host.submit(command)
        while True:
            try:
                found = self._events.get(timeout=LOOK_S)
            except queue.Empty:
                if is_cancelled():
                    self._host.cancel(number)
                continue
            if found.command_id != number:
                continue
            if isinstance(found.event, Failed):
                raise found.event.error
            yield found.event
            if isinstance(found.event, Finished | ModelLoaded):
                return
            if is_cancelled():
                self._host.cancel(number)


def server_model(url: str, model: str, key_file: str | None) -> RemoteModel:
    """Return the model that the options of `tandem chat` name.

    Raises:
        EngineError: the server cannot be asked, or has no such model.
    """
    address = replace(parse_url(url), model=model)
    if key_file is not None:
        return RemoteModel(address, _key_in(key_file))
    return RemoteModel(address, KeyStore(paths.api_keys_file()).get(address))


def _key_in(path: str) -> str:
    """Return the key in the first line of a file.

    Raises:
        EngineError: the file cannot be read, or has none.
    """
    try:
        with open(path, encoding="utf-8") as file:
            key = cleaned_key(file.readline(MAX_KEY))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else tr("it is no text")
        raise EngineError(tr("{name} cannot be read: {why}.").format(name=path, why=why)) from None
    if not key:
        raise EngineError(tr("{name} has no key in its first line.").format(name=path))
    return key
