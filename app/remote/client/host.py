"""Engine host for a model on another server."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from app.core.translation import tr
from app.remote.client.address import RemoteAddress, is_remote, remote_info, split_path
from app.remote.client.connection import STALL_S, Connection, NoServer, Unreachable
from app.remote.client.protocol import (
    AnswerReader,
    ListedModel,
    conversation_document,
    find_model,
    list_models,
    request_of,
)
from engine import (
    AnswerRequest,
    Cancelled,
    Command,
    CountTokens,
    EngineCrashed,
    EngineError,
    Event,
    Failed,
    Finished,
    HostEvent,
    Load,
    LoadParams,
    ModelLoaded,
    ModelUnloaded,
    TokensCounted,
    Unload,
    new_command_id,
)

log = logging.getLogger(__name__)

LAST_S = 5.0  # seconds that usage statistics may take to arrive after an answer's end
ALONE = (Load, Unload)  # commands that run exclusively
CLOSING = (Finished, Failed, ModelLoaded, ModelUnloaded, TokensCounted)


class _Call:
    """A running command, with the connection that it waits for and its answer so far."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.connection: Connection | None = None
        self.reader: AnswerReader | None = None
        self.is_cancelled = False

    def connect(self, address: RemoteAddress, key: str, stall_s: float = STALL_S) -> Connection:
        self.connection = Connection(address, key, stall_s)
        if self.is_cancelled:
            self.connection.abort()
        return self.connection

    def abort(self) -> None:
        self.is_cancelled = True
        if self.connection is not None:
            self.connection.abort()


class RemoteHost:
    """Host for one remote model; each command runs on its own thread.

    A cancelled command ends immediately, even if its thread is still waiting.

    Args:
        on_event: receives events on this host's threads, one at a time.
        key_of: returns a server's key, or ""; may block on the keyring.
        stall_s: read timeout for answers.
    """

    def __init__(
        self,
        on_event: Callable[[HostEvent], None],
        key_of: Callable[[RemoteAddress], str],
        stall_s: float = STALL_S,
    ) -> None:
        self._on_event, self._key_of, self._stall_s = on_event, key_of, stall_s
        self._lock = threading.RLock()
        self._waiting: deque[tuple[int, Command]] = deque()
        self._calls: dict[int, _Call] = {}
        self._threads: set[threading.Thread] = set()
        self._model: ModelLoaded | None = None
        self._listed = ListedModel("")
        self._is_closed = False

    @property
    def serves_tandem(self) -> bool:
        """Whether the server is a Tandem server."""
        return self._listed.is_tandem

    def submit(self, command: Command, command_id: int | None = None) -> int:
        """Queue a command and return its id; see `EngineHost`."""
        number = new_command_id() if command_id is None else command_id
        with self._lock:
            self._waiting.append((number, command))
            self._begin()
        return number

    def cancel(self, command_id: int | None = None) -> None:
        """Cancel one command or all."""
        with self._lock:
            for number, command in list(self._waiting):
                if command_id in (None, number):
                    self._waiting.remove((number, command))
                    self._send(number, _cancelled(_Call(command)))
            for number, call in list(self._calls.items()):
                if command_id in (None, number):
                    call.abort()
                    self._end(number, _cancelled(call))

    def close(self, timeout_s: float = 5.0) -> bool:
        """Cancel all commands; return whether their threads stopped in time."""
        with self._lock:
            self._is_closed = True
            self.cancel()
            self._model = None
            threads = list(self._threads)
        until = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _begin(self) -> None:
        while self._waiting and not self._is_closed:
            number, command = self._waiting[0]
            has_alone = any(isinstance(one.command, ALONE) for one in self._calls.values())
            if has_alone or (isinstance(command, ALONE) and self._calls):
                return
            self._waiting.popleft()
            call = self._calls[number] = _Call(command)
            name = f"tandem-remote-{number}"
            thread = threading.Thread(target=self._run, args=(number, call), name=name, daemon=True)
            self._threads.add(thread)
            thread.start()

    def _emit(self, number: int, event: Event) -> None:
        with self._lock:
            if number in self._calls:
                self._send(number, event)

    def _end(self, number: int, event: Event) -> None:
        with self._lock:
            if self._calls.pop(number, None) is None:
                return
            if isinstance(event, ModelLoaded):
                self._model = event
            elif isinstance(event, ModelUnloaded):
                self._model = None
            elif isinstance(event, Failed) and event.is_model_lost:
                event = replace(event, is_model_lost=self._model is not None)
                self._model = None
            self._send(number, event)
            self._begin()

    def _send(self, number: int, event: Event) -> None:
        self._on_event(HostEvent(number, event))

    # on the commands' threads

    def _run(self, number: int, call: _Call) -> None:
        try:
            self._do(number, call)
        except EngineError as error:
            self._end(number, Failed(error, self._is_gone(call, error)))
        except Exception as error:  # a bug must not leave an answer unfinished
            log.exception("command %s failed", type(call.command).__name__)
            text = tr("The answer was stopped by an unexpected error ({error}).")
            why = f"{type(error).__name__}: {error}"
            hint = tr("This is a bug in Tandem; the log has the details.")
            self._end(number, Failed(EngineCrashed(text.format(error=why), hint)))
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _do(self, number: int, call: _Call) -> None:
        command = call.command
        if isinstance(command, Load):
            self._end(number, self._load(call, command.params))
        elif isinstance(command, Unload):
            self._end(number, ModelUnloaded())
        elif isinstance(command, AnswerRequest):
            self._answer(number, call, command)
        elif isinstance(command, CountTokens):
            self._end(number, self._count(call, command))
        else:
            raise EngineError(
                tr("Remote models do not support this."),
                tr("Load a model on this machine instead."),
            )

    def _load(self, call: _Call, params: LoadParams) -> ModelLoaded:
        start = time.perf_counter()
        if not is_remote(params.path):
            raise EngineError(tr("This is not a server address."))
        address = split_path(params.path)
        listed = find_model(self._list(call, address), address)
        self._listed = listed
        named = replace(address, model=listed.name).path
        return ModelLoaded(
            info=remote_info(named, listed.n_ctx),
            params=replace(params, path=named),
            n_ctx=listed.n_ctx,
            memory=(),
            seconds=time.perf_counter() - start,
            vision=listed.vision,
        )

    def _list(self, call: _Call, address: RemoteAddress) -> list[ListedModel]:
        return list_models(address, call.connect(address, self._key_of(address)))

    def _loaded(self) -> tuple[RemoteAddress, ListedModel]:
        with self._lock:
            if self._model is None:
                raise EngineError(tr("No server is connected."), tr("Choose a remote model first."))
            return split_path(self._model.info.path), self._listed

    def _answer(self, number: int, call: _Call, command: AnswerRequest) -> None:
        address, listed = self._loaded()
        body = request_of(command, listed.name, is_tandem=listed.is_tandem)
        kind = "completions" if command.prompt is not None else "chat/completions"
        reader = call.reader = AnswerReader(command, address.host)
        connection = call.connect(address, self._key_of(address), self._stall_s)
        timer = threading.Timer(LAST_S, connection.abort)
        timer.daemon = is_waiting = True
        try:
            with closing(connection.events(f"{address.url}/{kind}", body)) as stream:
                for data in stream:
                    for event in reader.read(data):
                        self._emit(number, event)
                    if reader.is_over:
                        break
                    if reader.is_complete and is_waiting:
                        timer.start()
                        is_waiting = False
        except EngineError:
            if call.is_cancelled or not reader.is_complete:
                raise
        finally:
            timer.cancel()
            if not is_waiting:
                timer.join()
        if not reader.is_complete:
            text = tr("{host} ended the answer early.").format(host=address.host)
            raise Unreachable(text, tr("Check that the server is running."))
        *last, finished = reader.finish()
        for event in last:
            self._emit(number, event)
        self._end(number, finished)

    def _count(self, call: _Call, command: CountTokens) -> TokensCounted:
        address, listed = self._loaded()
        if not listed.is_tandem:
            text = tr("{host} cannot count tokens.").format(host=address.host)
            raise EngineError(text)
        if any(message.pictures for message in command.messages or ()):
            raise EngineError(tr("Images are not sent just to count tokens."))
        connection = call.connect(address, self._key_of(address))
        n_before = None
        if command.messages is not None:
            body = conversation_document(command.messages, command.tools)
            n_before = _n_tokens(connection, address, _prompt(connection, address, body))
        return TokensCounted(n_before, _n_tokens(connection, address, command.draft))

    def _is_gone(self, call: _Call, error: EngineError) -> bool:
        if not isinstance(error, Unreachable) or not isinstance(call.command, AnswerRequest):
            return False
        if isinstance(error, NoServer):
            return True
        try:
            address, _ = self._loaded()
            self._list(call, address)
        except Unreachable:
            return True
        except EngineError:
            pass
        return False


def _cancelled(call: _Call) -> Event:
    if isinstance(call.command, AnswerRequest):
        reader = call.reader or AnswerReader(call.command, "")
        return reader.finished("cancelled")
    return Failed(Cancelled("Loading"))


def _prompt(connection: Connection, address: RemoteAddress, body: Mapping[str, Any]) -> str:
    document = connection.json(f"{address.root}/apply-template", {**body, "model": address.model})
    return str(document.get("prompt", "")) if isinstance(document, dict) else ""


def _n_tokens(connection: Connection, address: RemoteAddress, text: str) -> int:
    if not text:
        return 0
    body = {"content": text, "parse_special": True, "model": address.model}
    document = connection.json(f"{address.root}/tokenize", body)
    tokens = document.get("tokens") if isinstance(document, dict) else None
    return len(tokens) if isinstance(tokens, list) else 0
