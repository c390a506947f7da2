"""Host of the models that this window's machines compute together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import engine  # what starts processes is resolved when it is used
from app.core.translation import tr
from app.remote.machines.team import MachineTeam, with_idle_ranks, without_idle_ranks
from engine import (
    Command,
    EngineError,
    Failed,
    HostEvent,
    Load,
    LoadParams,
    MachineLost,
    ModelLoaded,
    ModelResplit,
    ModelUnloaded,
    Resplit,
    SplitError,
    TokenTimes,
    WiresMeasured,
    far_id,
    local_id,
    machine_of,
    new_command_id,
)

if TYPE_CHECKING:
    from engine import EngineHost, Gathering


class TeamHost:
    """Host that has models computed by the machines of a team; see `EngineHost`.

    Devices of other machines have ids such as "1/cuda:0" outside of it.

    Args:
        on_event: receiver of events.
    """

    def __init__(self, on_event: Callable[[HostEvent], None], team: MachineTeam) -> None:
        self._on_event, self._team = on_event, team
        self._lock = threading.RLock()
        self._has_model, self._is_here = False, True
        self._inner: EngineHost | None = None
        self._gathering: Gathering | None = None

    def begin(self) -> None:
        """Start the machines' processes, which measure the links; what fails is told by a load."""
        with self._lock:
            if self._team.gathering is not None and self._team.is_complete:
                self._over(self._team.gathering).begin()

    def submit(self, command: Command, generation: int | None = None) -> int:
        """Queue a command and return the id that its events will carry."""
        number = new_command_id() if generation is None else generation
        with self._lock:
            try:
                if isinstance(command, Load):
                    inner: EngineHost = self._over(self._team.check(command.params.path))
                    command = Load(for_machines(command.params, self._team.n_machines))
                elif self._inner is None:
                    raise EngineError(tr("The model has been unloaded."))
                else:
                    inner = self._inner
                    if isinstance(command, Resplit):
                        command = Resplit(for_machines(command.params, self._team.n_machines))
                inner.submit(command, number)
            except EngineError as error:
                self._on_event(HostEvent(number, Failed(error)))
        return number

    def cancel(self, generation: int | None = None) -> None:
        """Ask a command to end, or all that run and wait; return at once."""
        with self._lock:
            if self._inner is not None:
                self._inner.cancel(generation)

    def leave(self) -> None:
        """End all processes though a model may be loaded, which is told as its loss."""
        has_model = self._has_model
        self.close()
        if has_model:
            error = EngineError(tr("The other machines have gone."), tr("Have them join again."))
            self._tell(HostEvent(0, Failed(error, is_model_lost=True)))

    def close(self, timeout_s: float = 5.0) -> bool:
        """Free the model and end all processes; return whether they ended in time."""
        with self._lock:
            inner, self._inner = self._inner, None
        return inner is None or inner.close(timeout_s)

    def _over(self, gathering: Gathering) -> engine.MachinesHost:
        if self._gathering is not gathering or self._inner is None:
            self.close(0.0)
            host = engine.MachinesHost(self._pass_on, gathering, self._team.port)
            self._gathering, self._inner = gathering, host
        assert isinstance(self._inner, engine.MachinesHost)
        return self._inner

    def _pass_on(self, event: HostEvent) -> None:
        """Pass an event on with the ids of devices that the window knows; runs on any thread."""
        found = event.event
        if isinstance(found, WiresMeasured):
            self._team.note_links(found)
            return
        if isinstance(found, ModelLoaded):
            found = self._shown(found)
        elif isinstance(found, ModelResplit):
            found = replace(found, model=self._shown(found.model))
        elif isinstance(found, Failed) and isinstance(found.error, MachineLost):
            hint = tr("Load it again once all machines are there.")
            found = replace(found, error=MachineLost(found.error.message, hint))
        elif isinstance(found, TokenTimes) and not self._is_here:
            return  # of this machine's rank, which has no part of the model
        self._tell(HostEvent(event.generation, found))

    def _shown(self, model: ModelLoaded) -> ModelLoaded:
        """Return a model as the window knows it; memory is that of this machine's ranks."""
        params = for_window(model.params)
        self._is_here = any(not machine_of(device) for device in params.devices)
        return replace(model, params=params, memory=model.memory if self._is_here else ())

    def _tell(self, event: HostEvent) -> None:
        """Send an event, and note whether there is a model after it."""
        found = event.event
        if isinstance(found, ModelLoaded):
            self._has_model = True
        elif isinstance(found, ModelUnloaded) or (
            isinstance(found, Failed) and found.is_model_lost
        ):
            self._has_model = False
        self._on_event(event)


def for_machines(params: LoadParams, n_machines: int) -> LoadParams:
    """Return parameters with each machine's own ids of devices.

    Machines without a rank get one without a share.

    Raises:
        SplitError: ranks of one machine are apart.
    """
    runs = [machine_of(device) for device in params.devices]
    if runs != sorted(runs):
        raise SplitError(
            tr("The devices of each machine must stand beside each other."),
            tr("Put the machines into their order."),
        )
    params = with_idle_ranks(params, n_machines)
    own = tuple(map(local_id, params.devices))
    return replace(params, devices=own, machines=engine.rank_counts(params.devices))


def for_window(params: LoadParams) -> LoadParams:
    """Return parameters with the ids of devices that the window knows."""
    numbers = [number for number, n in enumerate(params.machines) for _ in range(n)]
    devices = tuple(map(far_id, numbers, params.devices)) if numbers else params.devices
    return without_idle_ranks(replace(params, devices=devices, machines=()))
