"""The machines for `tandem serve --nodes`, and the subcommand `join`."""

from __future__ import annotations

import argparse
import os
import secrets
import threading
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import engine  # its planner is imported on first use
from app.cli.output import note
from app.devices.split.speed import this_machine
from app.server.context import MachinesState, wires_text
from engine import EngineError, LoadParams, list_devices

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine import EngineHost, Gathering, HostEvent, JoinedMachine, WiresMeasured


def machine_advice(
    params: LoadParams, machines: Iterable[JoinedMachine], linked: WiresMeasured
) -> str:
    """Say whether splitting over machines pays off, with predicted speeds; "" if unknown.

    Args:
        params: load parameters; devices and split are ignored.
        machines: the other machines.
        linked: measured links between all machines.
    """
    far = [info for machine in machines for info in machine.far_infos]
    wires = engine.Wires(measured=linked.wires)
    try:
        forecaster = this_machine([*engine.list_devices(), *far], wires).forecaster
        params = replace(params, machines=(), devices=("cpu",), split=None, groups=None)
        with closing(engine.Planner(params.path)) as planner:
            return engine.choose_machines(planner, params, forecaster).reason
    except EngineError:
        return ""  # the load will report the problem


TOKEN_VARIABLE = "TANDEM_TOKEN"  # environment variable with the token shared by all machines
PORT = 11436  # default port for joining
DEFAULT_MODE = "groups"  # split mode: each machine has its own blocks, split over its devices


def add_machines(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several machines")
    group.add_argument(
        "--nodes", type=int, metavar="N",
        help="run the model on N machines, including this one; run `tandem join` on each of the "
        "others",
    )  # fmt: skip
    group.add_argument(
        "--rendezvous", metavar="HOST:PORT",
        help="this machine's address and port for the others; the next port must also be free "
        f"(default: the address of the default route, port {PORT})",
    )  # fmt: skip
    group.add_argument(
        "--machine-link", choices=engine.MACHINE_LINKS, default="auto",
        help="how data moves between machines: gloo uses host memory; nccl goes from GPU to GPU or "
        "fails; auto uses NCCL on Linux if all GPUs are from NVIDIA and a test passes (default: "
        "auto)",
    )  # fmt: skip
    add_token(group)


def add_token(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--token", metavar="T",
        help=f"token shared by all machines; prefer setting {TOKEN_VARIABLE}, since other programs "
        "can see this option",
    )  # fmt: skip


def token_of(args: argparse.Namespace) -> str:
    """Return the token from the options or the environment, or "".

    Raises:
        EngineError: the token is too short.
    """
    token = args.token if args.token is not None else os.environ.get(TOKEN_VARIABLE, "")
    return engine.check_token(token) if token else ""


def local_devices(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the devices in the options; by default all GPUs, or the CPU if there are none."""
    if args.devices is not None:
        return tuple(engine.parse_devices(args.devices))
    gpus = tuple(device.id for device in list_devices() if device.id != "cpu")
    return gpus or ("cpu",)


class ServedMachines:
    """A server's machines.

    Args:
        args: options of `tandem serve`.
        params: load parameters from the options.

    Attributes:
        gathering: the machines that join this one.

    Raises:
        EngineError: an option is invalid, or listening failed.
    """

    def __init__(self, args: argparse.Namespace, params: LoadParams) -> None:
        if args.nodes < 2:
            raise EngineError("--nodes needs at least two machines.", "Omit it to use only one.")
        if args.plan is not None or args.models:
            what = "--plan" if args.plan is not None else "--models"
            raise EngineError("{option} cannot be combined with --nodes.", option=what)
        self._own = local_devices(args)
        params = replace(params, machine_link=args.machine_link)
        self._given, self._has_mode = params, args.split_mode is not None
        host, self._port = engine.parse_address(args.rendezvous or engine.default_address(), PORT)
        token = token_of(args) or secrets.token_urlsafe(16)
        sock = engine.listen_for_machines(host, self._port)
        self._port = int(sock.getsockname()[1])
        self.gathering: Gathering = engine.Gathering(sock, args.nodes, token, params.path)
        shown = "" if token_of(args) else f" --token {token}"
        note(
            f"Waiting for {args.nodes - 1} more machine{'s' * (args.nodes > 2)}. On each of them "
            f"run: tandem join {host}:{self._port}{shown or ' --token ...'}"
        )
        self.gathering.on_change = note
        self._linked: WiresMeasured | None = None

    def wait(self) -> LoadParams:
        """Wait until all machines have joined; return the load parameters for all of them."""
        while not self.gathering.wait(0.5):  # in short waits, so that signals are handled
            pass
        self.gathering.keep_places()
        joined = [machine.devices for machine in self.gathering.machines]
        devices = [*self._own, *(device for theirs in joined for device in theirs)]
        params = replace(
            self._given, devices=tuple(devices),
            machines=(len(self._own), *map(len, joined)),
        )  # fmt: skip
        return params if self._has_mode else replace(params, split_mode=DEFAULT_MODE)

    @property
    def problem(self) -> str:
        """A sentence that names the missing machines, or ""."""
        return "" if self.gathering.is_complete else self.gathering.missing

    @property
    def state(self) -> MachinesState:
        """The machines' state, for metrics."""
        return MachinesState(tuple(self.gathering.machines), self._linked)

    def _advise(self, linked: WiresMeasured) -> None:
        if advice := machine_advice(self._given, self.gathering.machines, linked):
            note(f"Predicted: {advice}")

    def make_host(self, on_event: Callable[[HostEvent], None]) -> EngineHost:
        """Start the engine, which sends its events to `on_event`."""

        def take(event: HostEvent) -> None:
            if isinstance(event.event, engine.WiresMeasured):
                self._linked = event.event
                note(wires_text(event.event))
                threading.Thread(target=self._advise, args=(event.event,), daemon=True).start()
            on_event(event)

        return engine.MachinesHost(take, self.gathering, self._port + 1)


def add_join(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "address", metavar="HOST:PORT", help="address that `tandem serve --nodes` shows"
    )
    add_token(parser.add_argument_group("handshake"))
    group = parser.add_argument_group("this machine")
    group.add_argument(
        "--model", metavar="FILE",
        help="this machine's copy of the model file (default: the same path as on the server)",
    )  # fmt: skip
    group.add_argument(
        "--devices", metavar="LIST",
        help="one device per rank, e.g. cuda:0,cuda:1 (default: all GPUs, else the CPU)",
    )  # fmt: skip
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")
    group.add_argument(
        "--interface", default="", metavar="NAME",
        help="network interface or its address (default: the one that routes to the server)",
    )  # fmt: skip


def run_join(args: argparse.Namespace) -> None:
    host, port = engine.parse_address(args.address, PORT)
    token = token_of(args)
    if not token:
        hint = "Pass it with --token or in {variable}."
        raise EngineError("The token is missing.", hint, variable=TOKEN_VARIABLE)
    request = engine.JoinRequest(
        host, port, token, local_devices(args), args.model or "", args.interface, args.threads
    )
    engine.join_machines(request, note)
