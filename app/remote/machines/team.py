"""The machines that have joined this one, and the host for models on all of them."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import engine  # its process classes are imported on first use
from app.core.translation import tr
from engine import (
    Command,
    DeviceInfo,
    DeviceSnapshot,
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
    is_cpu,
    local_id,
    machine_of,
    new_command_id,
)

if TYPE_CHECKING:
    from engine import EngineHost, Gathering, JoinedMachine

PORT = 11436  # default port for joining
TOKEN_BYTES = 18


def _disconnected() -> EngineError:
    return EngineError(tr("The other machines have disconnected."), tr("Have them join again."))


class MachineTeam:
    """Other machines that have joined this one, or are expected to.

    Attributes:
        on_change: called on any thread after a change.
        path: model file that the machines run together, or "".
        command: command line for joining, or "".
        gathering: the machines; None if none are expected.
        port: port for torchrun's agents.
        linked: measured links between all machines; None while unknown.
        status: last message about the machines.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.gathering: Gathering | None = None
        self.linked: WiresMeasured | None = None
        self.path = self.command = self.status = ""
        self.n_machines = self.port = 0

    def open(self, path: str, n_machines: int, address: str) -> None:
        """Start waiting for machines.

        Args:
            path: model file; each machine has a copy of it.
            n_machines: number of machines, including this one.
            address: this machine's address for the others, optionally with a port.

        Raises:
            EngineError: listening failed, or the file cannot be read.
        """
        self.close()
        host, port = engine.parse_address(address, PORT)
        sock = engine.listen_for_machines(host, port)
        port = int(sock.getsockname()[1])
        token = secrets.token_urlsafe(TOKEN_BYTES)
        try:
            gathering = engine.Gathering(sock, n_machines, token, path)
        except BaseException:
            sock.close()
            raise
        gathering.on_change = self._note
        self.path, self.n_machines, self.port = path, n_machines, port + 1
        words = f"TANDEM_TOKEN={token}", "tandem", "join", f"{host}:{port}"
        self.command = " ".join(words)
        self.status = ""
        self.gathering = gathering
        self.on_change()

    def close(self) -> None:
        """Disconnect the machines and stop waiting for others; safe to call twice."""
        gathering, self.gathering = self.gathering, None
        self.linked, self.path, self.command = None, "", ""
        if gathering is not None:
            gathering.on_change = lambda sentence: None
            gathering.close()
            self.on_change()

    @property
    def machines(self) -> tuple[JoinedMachine, ...]:
        """The machines that have joined."""
        return () if self.gathering is None else tuple(self.gathering.machines)

    @property
    def is_complete(self) -> bool:
        """Whether all machines have joined."""
        return self.gathering is not None and self.gathering.is_complete

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        """The other machines' devices, with ids such as "1/cuda:0"; () until all have joined."""
        if not self.is_complete:
            return ()
        return tuple(info for one in self.machines for info in one.far_infos)

    @property
    def states(self) -> list[DeviceSnapshot]:
        """Latest snapshots of the other machines' devices."""
        if not self.is_complete:
            return []
        return [
            replace(state, device=far_id(one.number, state.device))
            for one in self.machines
            for state in one.states
        ]

    def check(self, path: str) -> Gathering:
        """Return the machines for a model.

        Raises:
            EngineError: the machines have disconnected, or have joined for another model.
        """
        if self.gathering is None:
            raise _disconnected()
        if Path(path) != Path(self.path):
            name = Path(self.path).name
            what = tr("The other machines joined to run {name}.").format(name=name)
            raise EngineError(what, tr("Have them join again for this model."))
        return self.gathering

    def _note(self, status: str) -> None:
        self.status = status
        self.on_change()


IDLE_DEVICE = "cpu"  # device for idle ranks, which use no memory and compute nothing


def with_idle_ranks(params: LoadParams, n_machines: int) -> LoadParams:
    """Return parameters with an idle rank (share 0) added on each machine that has no rank.

    Raises:
        SplitError: a rank must be added, but blocks or experts go to a device outside the split.
    """
    used = {machine_of(device) for device in params.devices}
    left_out = [number for number in range(n_machines) if number not in used]
    if not left_out:
        return params
    if params.all_devices != params.devices:
        raise SplitError(
            tr("On other machines, blocks and experts can only go to a CPU that is in the split."),
            tr("Enable that CPU in the split, or keep them on GPUs."),
        )
    ranks = [(_machine(params, rank), rank) for rank in range(len(params.devices))]
    all_ranks = sorted([*ranks, *((number, None) for number in left_out)], key=itemgetter(0))
    devices = [
        far_id(number, IDLE_DEVICE) if rank is None else params.devices[rank]
        for number, rank in all_ranks
    ]
    return _moved(params, [rank for _, rank in all_ranks], devices)


def without_idle_ranks(params: LoadParams) -> LoadParams:
    """Return parameters without the ranks that `with_idle_ranks` added."""
    machines = [machine_of(device) for device in params.devices]
    shares = params.split or (1.0,) * len(machines)
    kept: list[int | None] = [
        i
        for i, device in enumerate(params.devices)
        if shares[i] or not is_cpu(device) or machines.count(machines[i]) > 1
    ]
    if not kept or len(kept) == len(machines):
        return params
    return _moved(params, kept, [params.devices[i] for i in kept if i is not None])


def _machine(params: LoadParams, rank: int) -> int:
    return machine_of(params.devices[rank])


def _moved(params: LoadParams, places: Sequence[int | None], devices: Sequence[str]) -> LoadParams:
    """Return parameters with new ranks; `places` has each rank's old index, or None if idle."""
    shares = params.split or (1.0,) * len(params.devices)
    new = {old: number for number, old in enumerate(places) if old is not None}
    groups = _moved_groups(params.group_sizes, places) if params.group_sizes else params.groups
    return replace(
        params,
        devices=tuple(devices),
        split=tuple(0.0 if old is None else shares[old] for old in places),
        groups=groups,
        overrides=tuple(
            (pattern, f"#{new[int(target[1:])]}" if target.startswith("#") else target)
            for pattern, target in params.overrides
        ),
    )


def _moved_groups(sizes: Sequence[int], places: Sequence[int | None]) -> tuple[int, ...]:
    of = [group for group, size in enumerate(sizes) for _ in range(size)]
    labels: list[float] = []
    for i, old in enumerate(places):
        after = [of[other] for other in places[i:] if other is not None]
        before = [of[other] for other in places[:i] if other is not None]
        if old is not None:
            labels.append(of[old])
        elif before and after and before[-1] == after[0]:
            labels.append(before[-1])  # inside a group, so the idle rank joins it
        else:
            labels.append(-1 - i)
    return tuple(len(list(run)) for _, run in groupby(labels))


class TeamHost:
    """Host for models on a team's machines; see `EngineHost`.

    In its events and commands, other machines' devices have ids such as "1/cuda:0".
    """

    def __init__(self, on_event: Callable[[HostEvent], None], team: MachineTeam) -> None:
        self._on_event, self._team = on_event, team
        self._lock = threading.RLock()
        self._has_model, self._is_here = False, True
        self._inner: EngineHost | None = None
        self._gathering: Gathering | None = None

    def begin(self) -> None:
        """Start the machines' processes, which measure the links; the next load reports errors."""
        with self._lock:
            if self._team.gathering is not None and self._team.is_complete:
                self._over(self._team.gathering).begin()

    def submit(self, command: Command, command_id: int | None = None) -> int:
        """Queue a command and return its id."""
        number = new_command_id() if command_id is None else command_id
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

    def cancel(self, command_id: int | None = None) -> None:
        """Cancel one command or all; return immediately."""
        with self._lock:
            if self._inner is not None:
                self._inner.cancel(command_id)

    def leave(self) -> None:
        """Stop all processes; report the loss of the model if one is loaded."""
        has_model = self._has_model
        self.close()
        if has_model:
            error = _disconnected()
            self._emit(HostEvent(0, Failed(error, is_model_lost=True)))

    def close(self, timeout_s: float = 5.0) -> bool:
        """Unload the model and stop all processes; return whether they stopped in time."""
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
        inner = event.event
        if isinstance(inner, WiresMeasured):
            self._team.linked = inner
            self._team.on_change()
            return
        if isinstance(inner, ModelLoaded):
            inner = self._shown(inner)
        elif isinstance(inner, ModelResplit):
            inner = replace(inner, model=self._shown(inner.model))
        elif isinstance(inner, Failed) and isinstance(inner.error, MachineLost):
            hint = tr("Load it again once all machines have joined.")
            inner = replace(inner, error=MachineLost(inner.error.message, hint))
        elif isinstance(inner, TokenTimes) and not self._is_here:
            return  # from this machine's idle rank
        self._emit(HostEvent(event.command_id, inner))

    def _shown(self, model: ModelLoaded) -> ModelLoaded:
        params = for_window(model.params)
        self._is_here = any(not machine_of(device) for device in params.devices)
        return replace(model, params=params, memory=model.memory if self._is_here else ())

    def _emit(self, event: HostEvent) -> None:
        inner = event.event
        if isinstance(inner, ModelLoaded):
            self._has_model = True
        elif isinstance(inner, ModelUnloaded) or (
            isinstance(inner, Failed) and inner.is_model_lost
        ):
            self._has_model = False
        self._on_event(event)


def for_machines(params: LoadParams, n_machines: int) -> LoadParams:
    """Return parameters with local device ids and a rank on each machine.

    Raises:
        SplitError: a machine's ranks are not adjacent.
    """
    runs = [machine_of(device) for device in params.devices]
    if runs != sorted(runs):
        raise SplitError(
            tr("Each machine's devices must be adjacent."), tr("Sort them by machine.")
        )
    params = with_idle_ranks(params, n_machines)
    own = tuple(map(local_id, params.devices))
    return replace(params, devices=own, machines=engine.rank_counts(params.devices))


def for_window(params: LoadParams) -> LoadParams:
    """Return parameters with the window's device ids."""
    numbers = [number for number, n in enumerate(params.machines) for _ in range(n)]
    devices = tuple(map(far_id, numbers, params.devices)) if numbers else params.devices
    return without_idle_ranks(replace(params, devices=devices, machines=()))
