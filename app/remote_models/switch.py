"""One engine host over two: models on this machine, and those of servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from app.remote_models.address import RemoteAddress, is_remote
from engine import (
    Command,
    Failed,
    FallbacksChanged,
    HostEvent,
    Load,
    ModelLoaded,
    ModelUnloaded,
    Unload,
)

if TYPE_CHECKING:
    from app.remote_models.host import RemoteHost
    from engine import EngineHost

FIRST_REMOTE: Final = 1 << 40
"""Number of the first command to a server; those of a process never get there."""

REMOTE_CLOSE_S: Final = 1.0
"""Longest wait in seconds for threads to end that may be looking for a server in vain."""

MakeLocal = Callable[[Callable[[HostEvent], None]], "EngineHost"]


class HostSwitch:
    """Host that loads files in an engine of its own, and addresses over the network.

    One model is loaded at a time: the other side gives up its own once a load has succeeded.

    Args:
        on_event: receiver of events.
        make_local: starts the engine of this machine.
        key_of: returns the key of a server; "" for none.
        starts_local: whether to start that engine at once, and not with its first command.
    """

    def __init__(
        self,
        on_event: Callable[[HostEvent], None],
        make_local: MakeLocal,
        key_of: Callable[[RemoteAddress], str],
        *,
        starts_local: bool,
    ) -> None:
        self._on_event, self._make_local, self._key_of = on_event, make_local, key_of
        self._local: EngineHost | None = None
        self._remote: RemoteHost | None = None
        self._is_remote = False  # where the loaded model is, or was last
        if starts_local:
            self._engine()

    @property
    def engine(self) -> EngineHost | None:
        """The engine of this machine, once it has started."""
        return self._local

    @property
    def serves_tandem(self) -> bool:
        """Whether the loaded model is one of another Tandem."""
        return self._is_remote and self._remote is not None and self._remote.serves_tandem

    def submit(self, command: Command) -> int:
        """Queue a command where it belongs; see `EngineHost`."""
        is_there = self._is_remote
        if isinstance(command, Load):
            is_there = is_remote(command.params.path)
        return (self._servers() if is_there else self._engine()).submit(command)

    def cancel(self, generation: int | None = None) -> None:
        """End a command, or all; see `EngineHost`."""
        local, remote = self._local, self._remote
        if local is not None and (generation is None or generation < FIRST_REMOTE):
            local.cancel(generation)
        if remote is not None and (generation is None or generation >= FIRST_REMOTE):
            remote.cancel(generation)

    def close(self, timeout_s: float = 5.0) -> bool:
        """End both; see `EngineHost`."""
        if self._remote is not None:
            self._remote.close(min(timeout_s, REMOTE_CLOSE_S))
        return self._local is None or self._local.close(timeout_s)

    def _engine(self) -> EngineHost:
        if self._local is None:
            self._local = self._make_local(self._pass_on)
        return self._local

    def _servers(self) -> RemoteHost:
        if self._remote is None:
            from app.remote_models.host import RemoteHost  # late: few people need the network

            self._remote = RemoteHost(self._pass_on, self._key_of, FIRST_REMOTE)
        return self._remote

    # on the threads of the hosts

    def _pass_on(self, event: HostEvent) -> None:
        """Pass an event on, unless it is about the model that the other side has replaced."""
        from_remote, found = event.generation >= FIRST_REMOTE, event.event
        if isinstance(found, ModelLoaded):
            self._move(from_remote)
        elif from_remote != self._is_remote:
            if isinstance(found, ModelUnloaded | FallbacksChanged):
                return
            if isinstance(found, Failed):  # the model that is in use is another
                event = replace(event, event=replace(found, is_model_lost=False))
        self._on_event(event)

    def _move(self, to_remote: bool) -> None:
        """Note where the model is now; the side that had it before frees its own."""
        has_moved, self._is_remote = to_remote != self._is_remote, to_remote
        left = self._local if to_remote else self._remote
        if has_moved and left is not None:
            left.submit(Unload())
