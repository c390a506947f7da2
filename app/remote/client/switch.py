"""Engine host that switches between local models, remote models and several machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from app.remote.client.address import RemoteAddress, is_remote
from engine import (
    Command,
    Failed,
    FallbacksChanged,
    HostEvent,
    Load,
    ModelLoaded,
    ModelUnloaded,
    Unload,
    machine_of,
)

if TYPE_CHECKING:
    from app.remote.client.host import RemoteHost
    from engine import EngineHost

LOCAL, SERVER, TEAM = range(3)
"""Where a model runs: on this machine, on a server, or on several machines together."""

REMOTE_CLOSE_S: Final = 1.0
"""Timeout in seconds for threads that may be waiting for an unreachable server."""

MakeHost = Callable[[Callable[[HostEvent], None]], "EngineHost"]
"""Starts a host that sends its events to the given callable."""


class HostSwitch:
    """Host that runs local models on the local engine and remote models on their servers.

    A load that uses other machines' devices goes to the host for several machines. Once a load has
    succeeded, the host of the previous model unloads it.

    Args:
        on_event: receives the events.
        make_local: starts this machine's engine.
        key_of: returns a server's key, or "".
        make_team: starts the host for models on several machines.
        starts_local: whether to start the local engine now rather than on first use.
    """

    def __init__(
        self,
        on_event: Callable[[HostEvent], None],
        make_local: MakeHost,
        key_of: Callable[[RemoteAddress], str],
        make_team: MakeHost,
        *,
        starts_local: bool,
    ) -> None:
        self._on_event, self._make_local, self._key_of = on_event, make_local, key_of
        self._make_team = make_team
        self._local: EngineHost | None = None
        self._remote: RemoteHost | None = None
        self._team: EngineHost | None = None
        self._place = LOCAL  # where the current or last model runs
        if starts_local:
            self._engine()

    @property
    def engine(self) -> EngineHost | None:
        """The local engine, if it has started."""
        return self._local

    @property
    def serves_tandem(self) -> bool:
        """Whether the loaded model is on a Tandem server."""
        return self._place == SERVER and self._remote is not None and self._remote.serves_tandem

    def submit(self, command: Command, command_id: int | None = None) -> int:
        """Send a command to its host; see `EngineHost`."""
        place = self._place
        if isinstance(command, Load):
            is_far = any(map(machine_of, command.params.all_devices))
            place = SERVER if is_remote(command.params.path) else TEAM if is_far else LOCAL
        return self._host(place).submit(command, command_id)

    def cancel(self, command_id: int | None = None) -> None:
        """Cancel one command or all; see `EngineHost`."""
        for host in (self._local, self._remote, self._team):
            if host is not None:
                host.cancel(command_id)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Close all hosts; see `EngineHost`."""
        if self._remote is not None:
            self._remote.close(min(timeout_s, REMOTE_CLOSE_S))
        if self._team is not None:
            self._team.close(timeout_s)
        return self._local is None or self._local.close(timeout_s)

    def team(self) -> EngineHost:
        """Return the host for models on several machines, starting it if necessary."""
        if self._team is None:
            self._team = self._make_team(partial(self._pass_on, TEAM))
        return self._team

    def _host(self, place: int) -> EngineHost:
        if place == TEAM:
            return self.team()
        return self._servers() if place == SERVER else self._engine()

    def _engine(self) -> EngineHost:
        if self._local is None:
            self._local = self._make_local(partial(self._pass_on, LOCAL))
        return self._local

    def _servers(self) -> RemoteHost:
        if self._remote is None:
            from app.remote.client.host import RemoteHost  # imported late: needs network modules

            self._remote = RemoteHost(partial(self._pass_on, SERVER), self._key_of)
        return self._remote

    # on the hosts' threads

    def _pass_on(self, place: int, event: HostEvent) -> None:
        inner = event.event
        if isinstance(inner, ModelLoaded):
            self._move(place)
        elif place != self._place:
            if isinstance(inner, ModelUnloaded | FallbacksChanged):
                return
            if isinstance(inner, Failed):  # another host's model was lost
                event = replace(event, event=replace(inner, is_model_lost=False))
        self._on_event(event)

    def _move(self, place: int) -> None:
        before, self._place = self._place, place
        left = (self._local, self._remote, self._team)[before]
        if before != place and left is not None:
            left.submit(Unload())
