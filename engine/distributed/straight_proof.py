"""Trial of direct transfers between machines: are they correct, and faster than host memory?

It runs on a separate thread, as a backend may hang; if it does, the groups are aborted and the
thread is abandoned.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.distributed.straight import Ports, StraightCommunicator, StraightGroup, StraightGroups
from engine.distributed.wire import Orders, Wire
from engine.errors import EngineError, Sentence
from engine.planning.speed.facts import MESSAGE_BYTES, WireSpeed

if TYPE_CHECKING:
    from engine.distributed.machine_comm import FarCommunicator, RankLayout
    from engine.distributed.machines import Machines
    from engine.hardware.fallbacks import Fallbacks
    from engine.model.sharding.split import ModelSplit

log = logging.getLogger(__name__)

PROOF_S = 30.0
"""Seconds within which all values must arrive, including the time to set up connections."""

NOT_ARRIVED = "values have not arrived within"
"""Start of the text with which a machine reports a timeout."""

N_TIMED = 15
"""Number of all-reduces of one token's value per timing."""

SHAPES = ((1, 4096), (96, 4096))
"""Shapes of the values: one token's, and one too large for a backend to send in one piece."""


def used_ports(split: ModelSplit, layout: RankLayout) -> list[Ports]:
    """Return the distinct sets of ports between which a model's passes send values.

    A pass goes from the embedding through the blocks to the output head. Values that are sent only
    occasionally go through host memory.
    """
    groups = [split.embedding.owners(), *(block.group for block in split.blocks), split.last_group]
    found = [layout.ports(group) for group in groups if group]
    for before, group in pairwise(groups):
        if before and group and not set(group) <= set(before):
            involved = tuple(sorted({before[0], *group}))
            found.append(layout.ports(involved, before[0]))
    return [ports for ports in dict.fromkeys(found) if len(ports) > 1]


def chosen_ports(
    machines: Machines, link: str, ports: Sequence[Ports], devices: Mapping[int, torch.device],
    agreed: Callable[[Any], list[Any]], fallbacks: Fallbacks,
) -> Mapping[Ports, StraightGroup]:  # fmt: skip
    """Return the process groups for all the ports, or none if host memory is to be used.

    All machines call it at the same time and get the same result. Unless direct transfers are
    requested, they also have to be faster than host memory.

    Args:
        link: see `LoadParams.machine_link`.
        ports: see `used_ports`.
        devices: device of each rank on this machine.
        agreed: returns all machines' values.
        fallbacks: record of fallbacks that make the model slower.

    Raises:
        EngineError: direct transfers were requested but fail; the error names a machine.
    """
    if link == "gloo" or not ports:
        return {}
    groups, is_tried = machines.straight, False
    names = {str(rank): str(device) for rank, device in devices.items()}
    gathered = agreed([_unfit(groups, ports, devices), names])
    why = _named(machines.names, [problem for problem, _ in gathered])
    if not why and groups is not None:
        is_tried, begun = True, time.monotonic()
        all_names = {int(rank): name for _, found in gathered for rank, name in found.items()}
        proof = Proof(groups, ports, devices, all_names)
        why = _named(machines.names, agreed(proof.problem()))
        name, took = groups.backend.name.upper(), time.monotonic() - begun
        if not why and link == "auto":
            straight_s, far_s = (
                sum(map(max, zip(*agreed(seconds), strict=True)))
                for seconds in (proof.seconds(), _far_seconds(machines, ports, devices))
            )
            if straight_s > far_s:
                groups.abort()
                log.info(
                    "values go through host memory between the machines: a token's take %.0f µs "
                    "there, and %.0f µs by %s", 1e6 * far_s, 1e6 * straight_s, name,
                )  # fmt: skip
                return {}
        if not why:
            log.info("%s carries values between the machines: proven in %.1f s (connections: %d)",
                     name, took, len(ports))  # fmt: skip
            return proof.groups
        groups.abort(why)
    if link == "nccl":
        raise EngineError(
            "NCCL cannot carry values between the machines: {problem}.",
            "Omit --machine-link nccl, or check drivers, network interfaces and firewalls.",
            problem=why,
        )
    log.info("values go through host memory between the machines: %s", why)
    if is_tried:
        fallbacks.report("machines", (), why)
    return {}


def _unfit(
    groups: StraightGroups | None, ports: Sequence[Ports], devices: Mapping[int, torch.device]
) -> str:
    """Return why this machine cannot try them, as the end of a sentence; "" if it can."""
    if groups is None:
        return Sentence("it can only send through host memory")
    if groups.why_not:
        return Sentence("it has failed before ({problem})", problem=groups.why_not)
    used = {rank for some in ports for machine, rank in some if machine == groups.machine}
    if any(devices[rank].type != groups.backend.device for rank in used):
        return Sentence("not all of its devices are NVIDIA GPUs")
    return groups.backend.problem


def _named(names: Sequence[str], problems: Sequence[str]) -> str:
    """Return the first problem, with its machine's name; "" if there is none.

    Timeouts are caused by another machine, so other problems come first.
    """
    found = [pair for pair in zip(names, problems, strict=True) if pair[1]]
    found.sort(key=lambda pair: pair[1].startswith(NOT_ARRIVED))
    if not found:
        return ""
    return Sentence("{machine}: {problem}", machine=found[0][0], problem=found[0][1])


class Proof:
    """Trial of direct transfers, which all machines start at the same time.

    Args:
        made: creates the process groups.
        ports: all ports that are used.
        devices: device of each rank on this machine.
        names: names of all ranks' devices.

    Attributes:
        groups: the groups created so far.
    """

    def __init__(
        self, made: StraightGroups, ports: Sequence[Ports], devices: Mapping[int, torch.device],
        names: Mapping[int, str],
    ) -> None:  # fmt: skip
        self._made, self._ports, self._devices, self._names = made, ports, devices, names
        self.groups: dict[Ports, StraightGroup] = {}
        self._problem = ""
        self._seconds: dict[Ports, float] = {}

    def problem(self, timeout_s: float = PROOF_S) -> str:
        """Return why direct transfers fail, as the end of a sentence; "" if they are exact."""
        thread = threading.Thread(target=self._run, name="tandem-straight-proof", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            self._made.is_stuck = True
            return Sentence("values have not arrived within {n:.0f} s", n=timeout_s)
        return self._problem

    def seconds(self) -> list[float]:
        """Return the seconds for a token's value, per set of ports; 0 if this machine has none."""
        return [self._seconds.get(ports, 0.0) for ports in self._ports]

    def _run(self) -> None:
        try:
            for ports in self._ports:
                names = tuple(self._names[rank] for _, rank in ports)
                self.groups[ports] = self._made.make(ports, names)
            for ports, group in self.groups.items():
                rank = dict(ports).get(self._made.machine)
                if rank is not None:
                    device = self._devices[rank]
                    comm = self._made.communicator(group, device)
                    for why in _problems(comm, ports, device):
                        self._problem = self._problem or why
                    self._seconds[ports] = seconds_of(comm, ports, device)
        except Exception as error:  # whatever the error is, the backend cannot be used
            log.warning("direct transfers between machines fail", exc_info=True)
            first = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            self._problem = self._problem or first or type(error).__name__


def _problems(comm: StraightCommunicator, ports: Ports, device: torch.device) -> Iterator[str]:
    machines = tuple(machine for machine, _ in ports)
    for shape in SHAPES:
        values = {machine: known_value(machine, shape) for machine in machines}
        mine = values[comm.machine].to(device)
        for source in machines:
            found = comm.broadcast(
                mine if source == comm.machine else None, source, machines, shape
            )
            if not _is_same(found, values[source]):
                yield Sentence("it delivers wrong values from machine {n}", n=source + 1)
        first, *others = values.values()
        total = comm.all_reduce(mine, machines, shape)
        if not _is_same(total, sum(others, start=first)):
            yield Sentence("the values that it delivers have a wrong sum")


def _far_seconds(
    machines: Machines, ports: Sequence[Ports], devices: Mapping[int, torch.device]
) -> list[float]:
    """Return `Proof.seconds` for transfers through host memory."""
    found = []
    for some in ports:
        rank = dict(some).get(machines.number)
        device = torch.device("cpu") if rank is None else devices[rank]
        comm = machines.far_for(device, "trial", some)
        found.append(0.0 if rank is None else seconds_of(comm, some, device))
    return found


def seconds_of(comm: FarCommunicator, ports: Ports, device: torch.device) -> float:
    """Return how long an all-reduce of a token's value between ports takes, in seconds."""
    machines, times = tuple(machine for machine, _ in ports), []
    value = torch.ones(SHAPES[0], device=device)
    for _ in range(N_TIMED):
        begun = time.perf_counter()
        comm.all_reduce(value, machines, SHAPES[0])
        times.append(time.perf_counter() - begun)
    return median(times)


def known_value(machine: int, shape: Sequence[int]) -> Tensor:
    """Return a value that all machines know: numbers of all magnitudes, and both zeros."""
    made = torch.Generator().manual_seed(1 + machine)
    value = torch.randn(*shape, generator=made)
    value *= torch.exp2(torch.randint(-140, 100, tuple(shape), generator=made).float())
    value[0, :2] = torch.tensor([0.0, -0.0])
    return value


def _is_same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.cpu().view(torch.int32), expected.view(torch.int32))


MIN_ROUNDS, MAX_ROUNDS = 30, 2000
"""Minimum and maximum number of round trips."""

USUAL_S, MAX_TRIAL_S = 0.2, 4.0
"""Seconds spent sending messages, usually and if some are slow; it takes many to measure how rare
slow ones are. Exchanges get half of the latter."""

MAX_S = 9.0
"""Total seconds for all links, during which this process sends nothing else."""

SLOW = 4.0
"""Multiple of the median above which a message counts as slow, for example after packet loss."""

FIRST_BYTES, MAX_BYTES = 64 << 10, 32 << 20
"""Sizes of the first and the largest tensor, in bytes; each is four times as large as the last."""

LARGE_S = 0.3
"""Seconds spent sending large tensors. Only the fastest counts, as a lost packet may delay one by
more than all of them take."""

END, EXCHANGE = -1, -2
"""Special message values: the end, and an exchange of further messages in both directions."""

N_EXCHANGES = 8
"""Number of rounds in such an exchange."""

FIRST_TOO_SLOW = 3
"""Number of initial messages to ignore, as threads are asleep at first."""


def measure_wires(wire: Wire) -> tuple[WireSpeed, ...]:
    """Return the speed of the link between every two machines; all machines call it together.

    Links are measured one after another, for some tenths of a second each.

    Raises:
        CommError: a process is lost.
    """
    orders, found = Orders(wire), list[WireSpeed]()
    pairs = list(combinations(range(len(wire.peers)), 2))
    for a, b in pairs:
        mine = None
        if wire.rank == a:
            mine = _Caller(wire, b, MAX_S / len(pairs)).measured()
        elif wire.rank == b:
            _answer(wire, a)
        found.append(WireSpeed(a, b, *orders.all_gather(mine)[a]))
    return tuple(found)


class _Caller:
    """The side of a measurement that sends first; a measurement takes at most `most_s` seconds."""

    def __init__(self, wire: Wire, other: int, most_s: float) -> None:
        self._wire, self._other = wire, other
        self._most_s = most_s
        self._message = torch.zeros(MESSAGE_BYTES // 8, dtype=torch.int64)

    def measured(self) -> tuple[float, float, float, float]:
        """Return the median and mean latency, bytes per second, and the mean time per exchange."""
        times = self._times(lambda: self._round_s() / 2, min(MAX_TRIAL_S, self._most_s / 2))
        exchanges = self._times(self._exchange_s, min(MAX_TRIAL_S / 2, self._most_s / 4))
        middle = median(times)
        n, spent, fastest = FIRST_BYTES, 0.0, 0.0
        while n <= MAX_BYTES and spent < min(LARGE_S, self._most_s / 4):
            seconds = self._large_s(n)
            fastest = max(fastest, n / max(seconds - 2 * middle, seconds / 2))
            spent += seconds
            n *= 4
        self._send(END)
        return middle, fmean(times), fastest, fmean(exchanges)

    def _times(self, measure: Callable[[], float], longest_s: float) -> list[float]:
        times = list[float]()
        begun = time.perf_counter()
        while len(times) < MAX_ROUNDS:
            times.append(measure())
            spent, n = time.perf_counter() - begun, len(times) - FIRST_TOO_SLOW
            enough_s = longest_s if _is_uneven(times) else min(USUAL_S, longest_s)
            if spent > longest_s or (n >= MIN_ROUNDS and spent > enough_s):
                break
        return times[FIRST_TOO_SLOW:] or times

    def _round_s(self) -> float:
        begun = time.perf_counter()
        self._send(0)
        self._wire.swap([], [(self._other, self._message)])
        return time.perf_counter() - begun

    def _exchange_s(self) -> float:
        self._send(EXCHANGE)
        self._wire.swap([], [(self._other, self._message)])
        begun = time.perf_counter()
        _exchange(self._wire, self._other, self._message)
        return (time.perf_counter() - begun) / N_EXCHANGES

    def _large_s(self, n_bytes: int) -> float:
        self._send(n_bytes)
        x = torch.zeros(n_bytes, dtype=torch.uint8)
        begun = time.perf_counter()
        self._wire.swap([(self._other, x)], [])
        self._wire.swap([], [(self._other, self._message)])
        return time.perf_counter() - begun

    def _send(self, n_bytes: int) -> None:
        self._message[0] = n_bytes
        self._wire.swap([(self._other, self._message)], [])


def _is_uneven(times: list[float]) -> bool:
    return max(times[FIRST_TOO_SLOW:], default=0.0) > SLOW * median(times)


def _answer(wire: Wire, caller: int) -> None:
    message: Tensor = torch.zeros(MESSAGE_BYTES // 8, dtype=torch.int64)
    while True:
        wire.swap([], [(caller, message)])
        n_bytes = int(message[0])
        if n_bytes == END:
            return
        if n_bytes > 0:
            wire.swap([], [(caller, torch.empty(n_bytes, dtype=torch.uint8))])
        wire.swap([(caller, message)], [])
        if n_bytes == EXCHANGE:
            _exchange(wire, caller, message)


def _exchange(wire: Wire, other: int, message: Tensor) -> None:
    for _ in range(N_EXCHANGES):
        wire.swap([(other, message)], [(other, torch.empty_like(message))])
