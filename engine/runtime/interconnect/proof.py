"""Which routes between GPUs may be used: those proven on this machine and tested at each load.

The first trial of a route by which one GPU writes to another's memory runs in a child process,
because some drivers never return from it. Results are stored by driver and slots. A short trial
follows at each load, because a machine's settings can change without a new driver.

The modules that run trials need Triton, and are imported only if there are two GPUs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import combinations, permutations
from typing import TYPE_CHECKING

import torch

from engine.errors import EngineError, Sentence
from engine.hardware.backend_choice import kernels_for
from engine.hardware.devices.catalog import list_devices
from engine.hardware.devices.topology import Pair, Place, Routes, Way, read_topology
from engine.hardware.devices.types import DeviceInfo
from engine.hardware.faults import stopped_error
from engine.hardware.torch_devices import release_cached_memory, torch_device
from engine.load_params import PeerMode
from engine.planning.speed.link_records import (
    MEANS,
    NCCL,
    LinkRecord,
    Means,
    TrialRecord,
    chosen_way,
    link_problems,
    nccl_pays,
)
from engine.planning.speed.machine_file import MachineFile

if TYPE_CHECKING:
    from engine.runtime.interconnect.exchange import GpuBench
    from engine.runtime.interconnect.trial import Effort

log = logging.getLogger(__name__)

PLACES: tuple[Place, ...] = ("host", "peer")
"""Places to try between two GPUs."""

BY: Mapping[str, str] = {
    "peer": Sentence("over the direct link"), "host": Sentence("through host memory"), "device": "",
}  # fmt: skip
"""Descriptions of the places through which data travels, for reports of failed routes."""

Trials = dict[tuple[Means, Place], TrialRecord]
"""Trial results for one direction."""

Found = Mapping[Pair, Trials]
"""Trial results by direction."""


def find_routes(
    devices: Sequence[str], p2p: PeerMode = "auto", *, file: MachineFile | None = None,
    machine: ThisMachine | None = None,
) -> Routes:  # fmt: skip
    """Return the routes between all GPUs that have parts of a model.

    Args:
        devices: the ranks' devices; the CPU and repetitions are ignored.
        p2p: see `LoadParams`.
        file: machine file to store results in; the user's by default.
        machine: the GPUs and their trials; this machine by default.
    """
    gpus = _gpus(devices)
    if len(gpus) < 2:
        return Routes()
    machine = machine or ThisMachine()
    if not set(gpus) <= set(machine.infos()):  # proofs are stored by the GPUs' identity
        return Routes(dict.fromkeys(permutations(gpus, 2), Way(None, "host")))
    prover = Prover(gpus, p2p, file or MachineFile.of_user(), machine)
    prover.try_missing()
    return prover.routes()


def prove_links(
    devices: Sequence[str], *, file: MachineFile | None = None, machine: ThisMachine | None = None
) -> Routes:
    """Try and time all routes between GPUs again, even known ones; this takes some seconds.

    Args:
        devices: ids of GPUs; for all arguments see `find_routes`.

    Returns:
        The resulting routes for the default `p2p`.
    """
    if len(_gpus(devices)) < 2:
        return Routes()
    file, machine = file or MachineFile.of_user(), machine or ThisMachine()
    prover = Prover(_gpus(devices), "auto", file, machine, again=True)
    prover.try_missing()
    return prover.routes()


def _gpus(devices: Sequence[str]) -> list[str]:
    return [device for device in dict.fromkeys(devices) if device != "cpu"]


class Prover:
    """Finder of the routes between GPUs; with `again`, it tries even known ones."""

    def __init__(
        self, devices: Sequence[str], p2p: PeerMode, file: MachineFile, machine: ThisMachine,
        *, again: bool = False,
    ) -> None:  # fmt: skip
        self._devices, self._p2p, self._file, self._machine = devices, p2p, file, machine
        self._again = again
        self._infos = machine.infos()
        self._pairs = list(combinations(devices, 2))
        self._forbidden = {
            pair: Sentence("peer access is off") if p2p == "off" else machine.peer_problem(*pair)
            for pair in self._pairs
        }
        self._records = {
            pair: (None if again else self._known(*pair)) or LinkRecord(_today())
            for pair in permutations(devices, 2)
        }

        self._fresh: set[Pair] = set()

    def try_missing(self) -> None:
        """Try all routes that are not known yet, and store the results."""
        apart = [pair for pair in self._pairs if self._misses(pair, "peer")]
        if apart:
            self._keep(self._machine.try_in_child(apart, PLACES, with_nccl=self._again))
        for pair in self._pairs:
            if self._misses(pair, "host"):
                self._keep(self._tried_here(pair, "host"))

    def routes(self) -> Routes:
        """Return the routes that follow from all results, after briefly trying those to be used."""
        pairs: dict[Pair, Way] = {}
        notes: list[str] = []
        for a, b in self._pairs:
            why = self._forbidden[a, b]
            if self._p2p == "on" and why and not self._again:
                note = "{a} and {b} cannot access each other's memory: {why}."
                notes.append(Sentence(note, a=a, b=b, why=why))
            notes += self._checked(a, b)
            for pair in ((a, b), (b, a)):
                pairs[pair] = way = self._way(pair)
                if way.stores is None and "stores" in self._machine.means(a, b):
                    note = "Kernels on {a} cannot write to {b}; slower copies are used instead."
                    notes.append(Sentence(note, a=pair[0], b=pair[1]))
                if self._p2p == "on" or pair in self._fresh:  # known problems are shown elsewhere
                    notes += link_problems(*pair, self._records[pair], self._mode(pair))
        self._machine.release(self._devices)
        has_nccl = all(
            nccl_pays(self._records[a, b], self._records[b, a], self._mode((a, b)))
            for a, b in self._pairs
        )
        return Routes(pairs, has_nccl, tuple(dict.fromkeys(notes)))

    def _checked(self, a: str, b: str) -> list[str]:
        """Try the routes that would be used between two GPUs; return a note for each failure."""
        from engine.runtime.interconnect.trial import QUICK

        notes: list[str] = []
        done: set[tuple[Means, Place]] = set()
        while todo := self._used(a, b) - done:
            for means, place in sorted(todo):
                done.add((means, place))
                for pair, trial in self._tried(a, b, means, place, QUICK).items():
                    if trial.passed or not self._records[pair].passed(means, place):
                        continue
                    trials = {**self._records[pair].trials, (means, place): trial}
                    self._records[pair] = LinkRecord(_today(), trials)
                    if trial.verdict == "refused":
                        failure = LinkRecord(_today(), {(means, place): trial})
                        notes += link_problems(*pair, failure, "on")
                        continue
                    note = (
                        "Data from {a} to {b} {way} used to arrive but no longer does; the next"
                        " load tests this again."
                    )
                    notes.append(Sentence(note, a=pair[0], b=pair[1], way=BY[place]))
                    for ends in ((a, b), (b, a)):
                        self._file.forget_proof(*(self._infos[end] for end in ends))
        return notes

    def _used(self, a: str, b: str) -> set[tuple[Means, Place]]:
        found: set[tuple[Means, Place]] = set()
        for pair in ((a, b), (b, a)):
            way = self._way(pair)
            found.add(("copies", way.copies))
            if way.stores is not None:
                found.add(("stores", way.stores))
        return found

    def _tried_here(self, pair: Pair, place: Place) -> Found:
        from engine.runtime.interconnect.trial import FULL

        a, b = pair
        found: dict[Pair, Trials] = {(a, b): {}, (b, a): {}}
        for means in self._machine.means(a, b):
            for direction, trial in self._tried(a, b, means, place, FULL).items():
                found[direction][means, place] = trial
        return found

    def _tried(
        self, a: str, b: str, means: Means, place: Place, effort: Effort
    ) -> Mapping[Pair, TrialRecord]:
        from engine.runtime.interconnect.trial import failed_trials, try_route

        try:
            there, back = try_route(self._machine.bench(a, b), means, place, effort)
        except (EngineError, RuntimeError) as error:  # CUDA can raise any RuntimeError
            if stopped := stopped_error(error, [torch.device(name) for name in (a, b)]):
                raise stopped from None
            log.warning("%s between %s and %s via %s failed: %s", means, a, b, place, error)
            there, back = failed_trials(error)
        return {(a, b): there, (b, a): back}

    def _misses(self, pair: Pair, place: Place) -> bool:
        """Return whether trials of a place are missing, or must be repeated because p2p is "on"."""
        if place == "peer" and self._forbidden[pair]:
            return False
        a, b = pair
        records = self._records[a, b], self._records[b, a]
        keys = [(means, place) for means in self._machine.means(a, b)]
        if place == "peer" and self._p2p == "on":
            return not all(record.passed(*key) for record in records for key in keys)
        return not all(key in record.trials for record in records for key in keys)

    def _mode(self, pair: Pair) -> PeerMode:
        a, b = pair
        return "off" if self._forbidden.get((a, b)) or self._forbidden.get((b, a)) else self._p2p

    def _way(self, pair: Pair) -> Way:
        return chosen_way(self._records[pair], self._mode(pair))

    def _known(self, source: str, goal: str) -> LinkRecord | None:
        return self._file.proof(self._infos[source], self._infos[goal])

    def _keep(self, found: Found) -> None:
        """Merge in new results; on disk, leave out trials that could not start."""
        for pair, trials in found.items():
            self._fresh.add(pair)
            self._records[pair] = LinkRecord(_today(), {**self._records[pair].trials, **trials})
            source, goal = (self._infos[end] for end in pair)
            lasting = {
                key: trial for key, trial in self._records[pair].trials.items()
                if trial.verdict != "refused"
            }  # fmt: skip
            self._file.keep_proof(source, goal, LinkRecord(_today(), lasting))


def _today() -> str:
    return date.today().isoformat()


UNKNOWN = Sentence("the driver does not allow it")
"""Reason used if the driver gives none."""


class ThisMachine:
    """The GPUs of this machine, and the trials of their links."""

    def __init__(self) -> None:
        self._infos = {info.id: info for info in list_devices() if info.kind != "cpu"}
        self._benches: dict[Pair, GpuBench] = {}
        self._problems: Mapping[frozenset[str], str] | None = None

    def infos(self) -> Mapping[str, DeviceInfo]:
        """Return all GPUs by id."""
        return self._infos

    def peer_problem(self, a: str, b: str) -> str:
        """Return why the driver forbids peer access, as part of a sentence; "" if it allows it."""
        one, other = torch_device(a), torch_device(b)
        reaches = torch.cuda.can_device_access_peer
        if reaches(one, other) and reaches(other, one):
            return ""
        if self._problems is None:
            links = read_topology().links
            self._problems = {frozenset((k.a, k.b)): k.peer_problem for k in links}
        return self._problems.get(frozenset((a, b))) or UNKNOWN

    def means(self, a: str, b: str) -> Sequence[Means]:
        """Return the means to try between two GPUs; no stores if kernels are not used."""
        return MEANS if kernels_for(a) == kernels_for(b) == "gpu" else ("copies",)

    def bench(self, a: str, b: str) -> GpuBench:
        """Return a bench for trials of two GPUs in this process.

        Raises:
            EngineError: the GPUs cannot be used.
        """
        from engine.runtime.interconnect.exchange import GpuBench

        found = self._benches.get((a, b))
        if found is None:
            numbers = [torch_device(name).index for name in (a, b)]
            found = GpuBench(numbers, (a, b))
            if "stores" in self.means(a, b):
                found.warm_up()
            self._benches[a, b] = found
        return found

    def release(self, devices: Sequence[str]) -> None:
        """Free the memory used by trials."""
        self._benches.clear()
        release_cached_memory([torch_device(name) for name in devices])

    def try_in_child(
        self, pairs: Sequence[Pair], places: Sequence[Place], *, with_nccl: bool
    ) -> Mapping[Pair, dict[tuple[Means, Place], TrialRecord]]:
        """Try pairs with full effort in child processes; hangs and crashes count as results."""
        from engine.runtime.interconnect.child import TrialStep, try_steps

        steps = [
            TrialStep(pair, means, place)
            for pair in pairs for place in places for means in self.means(*pair)
        ]  # fmt: skip
        if with_nccl:
            steps += [TrialStep(pair, *NCCL) for pair in pairs]
        names = dict.fromkeys(name for pair in pairs for name in pair)
        found: dict[Pair, dict[tuple[Means, Place], TrialRecord]] = {}
        for tried in try_steps(steps, {name: self._infos[name].uuid for name in names}):
            a, b = tried.step.pair
            key = tried.step.means, tried.step.place
            found.setdefault((a, b), {})[key] = tried.there
            found.setdefault((b, a), {})[key] = tried.back
        return found
