"""The machines that have joined this one for one model's file."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import engine  # what starts processes is resolved when it is used
from app.core.translation import tr
from engine import (
    DeviceInfo,
    DeviceSnapshot,
    EngineError,
    LoadParams,
    SplitError,
    far_id,
    is_cpu,
    machine_of,
)

if TYPE_CHECKING:
    from engine import Gathering, JoinedMachine, WiresMeasured

PORT = 11436
"""Port at which machines join, if it is free."""

TOKEN_BYTES = 18
"""Number of random bytes of a token."""


class MachineTeam:
    """Other machines that have joined this one, or are awaited.

    Attributes:
        on_change: called on any thread when something of it has changed.
        path: path of the model's file that they compute; "" for none.
        command: command line that makes a machine join; "" for none.
        gathering: the machines; None while nobody is awaited.
        port: port for torchrun's agents.
        linked: measured links between all machines; None while they are unknown.
        said: last sentence about them.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.gathering: Gathering | None = None
        self.linked: WiresMeasured | None = None
        self.path = self.command = self.said = ""
        self.n_machines = self.port = 0

    def open(self, path: str, n_machines: int, address: str) -> None:
        """Wait for machines from now on.

        Args:
            path: path of the model's file, of which each has a copy.
            n_machines: number of machines, with this one.
            address: address of this machine at which they join, with or without a port.

        Raises:
            EngineError: nobody can join there, or the file cannot be read.
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
        self.said = ""
        self.gathering = gathering
        self.on_change()

    def close(self) -> None:
        """Let the machines go, and await no others; safe to call twice."""
        gathering, self.gathering = self.gathering, None
        self.linked, self.path, self.command = None, "", ""
        if gathering is not None:
            gathering.on_change = lambda sentence: None
            gathering.close()
            self.on_change()

    @property
    def machines(self) -> tuple[JoinedMachine, ...]:
        """The machines that are there."""
        return () if self.gathering is None else tuple(self.gathering.machines)

    @property
    def is_complete(self) -> bool:
        """Whether all machines are there."""
        return self.gathering is not None and self.gathering.is_complete

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        """Devices of the others, with ids such as "1/cuda:0"; none before all are there."""
        if not self.is_complete:
            return ()
        return tuple(info for one in self.machines for info in one.far_infos)

    @property
    def states(self) -> list[DeviceSnapshot]:
        """States of these devices, as they were told last."""
        if not self.is_complete:
            return []
        return [
            replace(state, device=far_id(one.number, state.device))
            for one in self.machines
            for state in one.states
        ]

    def note_links(self, linked: WiresMeasured) -> None:
        """Note measured links."""
        self.linked = linked
        self.on_change()

    def check(self, path: str) -> Gathering:
        """Return the machines for a model.

        Raises:
            EngineError: they are not there, or have joined for another model.
        """
        if self.gathering is None:
            raise EngineError(tr("The other machines have gone."), tr("Have them join again."))
        if Path(path) != Path(self.path):
            name = Path(self.path).name
            what = tr("The other machines have joined for {name}.").format(name=name)
            raise EngineError(what, tr("Have them join again for this model."))
        return self.gathering

    def _note(self, sentence: str) -> None:
        """Note a sentence about machines that come and go; runs on any thread."""
        self.said = sentence
        self.on_change()


IDLE_DEVICE = "cpu"
"""Device of such a rank on its machine, where it takes no memory and computes nothing."""


def with_idle_ranks(params: LoadParams, n_machines: int) -> LoadParams:
    """Return parameters in which each machine has a rank: one without a share where it had none.

    Raises:
        SplitError: parts go to a device that is none of the ranks', as on a single machine.
    """
    used = {machine_of(device) for device in params.devices}
    left_out = [number for number in range(n_machines) if number not in used]
    if not left_out:
        return params
    if params.all_devices != params.devices:
        raise SplitError(
            tr("Whole blocks and experts can only go to a CPU of other machines that takes part."),
            tr("Switch it on in the split, or leave them to GPUs."),
        )
    ranks = [(_machine(params, rank), rank) for rank in range(len(params.devices))]
    all_ranks = sorted([*ranks, *((number, None) for number in left_out)], key=itemgetter(0))
    devices = [
        far_id(number, IDLE_DEVICE) if rank is None else params.devices[rank]
        for number, rank in all_ranks
    ]
    return _moved(params, [rank for _, rank in all_ranks], devices)


def without_idle_ranks(params: LoadParams) -> LoadParams:
    """Return parameters without the ranks that `with_idle_ranks` has added."""
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
    """Return parameters with other ranks: the old number of each, or None for an idle one."""
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
    """Return the sizes of the groups, of which an idle rank joins the one that it stands in."""
    of = [group for group, size in enumerate(sizes) for _ in range(size)]
    labels: list[float] = []
    for i, old in enumerate(places):
        behind = [of[other] for other in places[i:] if other is not None]
        before = [of[other] for other in places[:i] if other is not None]
        if old is not None:
            labels.append(of[old])
        elif before and behind and before[-1] == behind[0]:
            labels.append(before[-1])
        else:
            labels.append(-1 - i)
    return tuple(len(list(run)) for _, run in groupby(labels))
