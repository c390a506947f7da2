"""Records of tested routes between two GPUs: results, the route to use, and its problems.

Imports no torch, because records on disk are shown without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from engine.hardware.devices.topology import Place, Way
from engine.load_params import PeerMode
from engine.planning.speed.facts import LinkFacts
from engine.util.codec import WrongValue, read_document

Verdict = Literal["passed", "lost", "wrong", "hung", "crashed", "refused"]
"""Result of a trial: all values arrived; some did not; some arrived damaged; it did not finish; it
crashed the test program; it could not be started."""

Means = Literal["stores", "copies", "nccl"]
"""Means of transfer: stores from kernels, copies, or NCCL, which chooses its own route."""

MEANS: tuple[Means, ...] = ("stores", "copies")
"""Means that a model needs; NCCL only makes it faster."""

NCCL: tuple[Means, Place] = ("nccl", "peer")
"""Key for NCCL's trial in `LinkRecord.trials`."""

TOKEN_SUM_BYTES = 16 << 10
"""Bytes in an all-reduce for one token: 4096 numbers."""

COVERED_BYTES = 32 << 10
"""Maximum number of bytes sent within the latency of a small all-reduce."""

SLOW_STORES = 0.1
"""Fraction of the copy speed below which kernel writes count as slow."""

TELLING_BYTES = 128 << 10
"""Minimum size, in bytes, of kernel writes that show their bandwidth."""

FEW_LANES = 4
"""Maximum number of PCIe lanes in slots meant for other cards, or connected to the chipset."""

TRIES_AGAIN = "'tandem devices --measure' repeats the test"


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """Test result for one route in one direction.

    Attributes:
        verdict: the result.
        why: observed fault, as part of a sentence; "" if the test passed.
        seconds: times in seconds by payload in bytes, for an exchange in which both GPUs write that
            much (stores), or for a copy while another runs in the other direction (copies).
        lanes: PCIe generation and width of the source's slot just after copies; zeros if unknown.
    """

    verdict: Verdict
    why: str = ""
    seconds: Mapping[int, float] = field(default_factory=dict, metadata={"min": 1e-12, "max": 1e6})
    lanes: tuple[int, int] = (0, 0)

    @property
    def passed(self) -> bool:
        """Whether all values arrived."""
        return self.verdict == "passed"


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """Results for all routes in one direction.

    Attributes:
        date: day on which the routes were tested, such as 2026-03-01.
        trials: results by means and place; routes that were not tested are missing.
    """

    date: str
    trials: Mapping[tuple[Means, Place], TrialRecord] = field(default_factory=dict)

    def passed(self, means: Means, place: Place) -> bool:
        """Return whether a route was tested and all values arrived."""
        trial = self.trials.get((means, place))
        return trial is not None and trial.passed


def chosen_way(record: LinkRecord | None, p2p: PeerMode) -> Way:
    """Return the routes to use, given the results.

    "auto" takes the faster of two routes that passed, because on some machines, GPUs read each
    other's memory fast but write it slowly. Copies through host memory need no test, because
    drivers split them into two copies that always work.
    """
    if record is None:
        return Way(None, "host")
    stores = _chosen(record, "stores", p2p)
    return Way(stores, _chosen(record, "copies", p2p) or "host")


def nccl_pays(there: LinkRecord, back: LinkRecord, p2p: PeerMode) -> bool:
    """Return whether two GPUs may exchange large values through NCCL, faster than with copies.

    NCCL itself decides whether a GPU writes to the other's memory, so that must have passed.
    """
    if p2p == "off":
        return False
    for record in (there, back):
        peers = [trial for (_, place), trial in record.trials.items() if place == "peer"]
        if not record.passed(*NCCL) or not all(trial.passed for trial in peers):
            return False
        copies = record.trials.get(("copies", chosen_way(record, p2p).copies))
        if copies is None or not copies.seconds or not record.trials[NCCL].seconds:
            return False
        if _typical_s(record.trials[NCCL], "copies") >= _typical_s(copies, "copies"):
            return False
    return True


def _chosen(record: LinkRecord, means: Means, p2p: PeerMode) -> Place | None:
    """Return the place that a means of transfer should use; None if none passed."""
    by_peer, by_host = (record.passed(means, place) for place in ("peer", "host"))
    if not by_peer or p2p == "off":
        return "host" if by_host else None
    if p2p == "on" or not by_host:
        return "peer"
    peer, host = (_typical_s(record.trials[means, place], means) for place in ("peer", "host"))
    return "host" if host < peer else "peer"


def _typical_s(trial: TrialRecord, means: Means) -> float:
    """Return the time for a typical payload (small for stores, large for copies); 0 if unknown."""
    if means == "copies":
        return trial.seconds[max(trial.seconds)] if trial.seconds else 0.0
    known = [n for n in trial.seconds if n >= TOKEN_SUM_BYTES]
    return trial.seconds[min(known)] if known else 0.0


def speed_of(record: LinkRecord, way: Way) -> LinkFacts | None:
    """Return the latency and bandwidth of the routes in use; None if they were not measured."""
    copies = record.trials.get(("copies", way.copies))
    stores = record.trials.get(("stores", way.stores)) if way.stores else None
    if copies is None or not copies.seconds:
        return None
    n_bytes = max(copies.seconds)
    bytes_per_s = n_bytes / copies.seconds[n_bytes]
    small = {n: s for n, s in stores.seconds.items() if n <= COVERED_BYTES} if stores else {}
    if small:
        return LinkFacts(max(small.values()), bytes_per_s, max(small))
    return LinkFacts(copies.seconds[min(copies.seconds)], bytes_per_s, min(copies.seconds))


def link_problems(source: str, target: str, record: LinkRecord, p2p: PeerMode) -> tuple[str, ...]:
    """Return sentences on faults and slowness in the direction from `source` to `target`."""
    said = []
    for (means, place), trial in record.trials.items():
        is_missed = (means, place) != NCCL or trial.verdict != "refused"  # many lack NCCL
        if not trial.passed and is_missed and not (place == "peer" and p2p == "off"):
            said.append(_failure(source, target, means, place, trial, record.date))
    said += filter(None, (_slowness(source, target, record, chosen_way(record, p2p)),))
    said += filter(None, (_narrowness(source, record),))
    return tuple(said)


def _failure(
    source: str, target: str, means: Means, place: Place, trial: TrialRecord, date: str
) -> str:
    """Return a sentence about a route that did not pass."""
    what = {
        ("stores", "peer"): f"Kernel writes from {source} to {target}",
        ("stores", "host"): f"Kernel writes from {source} to {target} through host memory",
        ("copies", "peer"): f"Direct copies from {source} to {target}",
        ("copies", "host"): f"Copies from {source} to {target} through host memory",
        NCCL: f"NCCL transfers from {source} to {target}",
    }[means, place]
    instead = {
        ("stores", "peer"): "host memory is used instead",
        ("copies", "peer"): "host memory is used instead",
        ("stores", "host"): "copies are used instead",
        ("copies", "host"): "results may be wrong",
        NCCL: "NCCL is not used",
    }[means, place]
    detail = f" ({trial.why})" if trial.why else ""
    if trial.verdict == "refused":
        return f"{what} were not tested{detail}; {instead}."
    seen = {
        "lost": "do not arrive", "wrong": "arrive damaged", "hung": "never finish",
        "crashed": "crash the test program",
    }[trial.verdict]  # fmt: skip
    again = f"; {TRIES_AGAIN}" if trial.verdict in ("hung", "crashed") else ""
    return f"{what} {seen}{detail}, tested on {date}; {instead}{again}."


def _slowness(source: str, target: str, record: LinkRecord, way: Way) -> str:
    """Return a sentence on kernel writes that are far slower than copies; "" if they are not."""
    stores = record.trials.get(("stores", way.stores)) if way.stores else None
    copies = record.trials.get(("copies", way.copies))
    if stores is None or copies is None or not copies.seconds:
        return ""
    if max(stores.seconds, default=0) < TELLING_BYTES:  # below that, latency dominates
        return ""
    rates = [max(t.seconds) / t.seconds[max(t.seconds)] for t in (stores, copies)]
    if rates[0] >= SLOW_STORES * rates[1]:
        return ""
    return (
        f"Kernel writes from {source} to {target} reach {rates[0] / 1e9:.2g} GB/s, copies "
        f"{rates[1] / 1e9:.2g} GB/s; per-token exchanges are slower than they could be."
    )


def _narrowness(source: str, record: LinkRecord) -> str:
    """Return a sentence on a slot that is slow under load; "" if the slot is not."""
    known = [trial.lanes for trial in record.trials.values() if all(trial.lanes)]
    if not known:
        return ""
    generation, width = max(known, key=lambda lanes: lanes[0] * lanes[1])
    if generation > 1 and width > FEW_LANES:
        return ""
    return (
        f"The slot of {source} runs at PCIe {generation}.0 x{width} under load; another slot, a "
        "better riser or a motherboard setting may make it faster."
    )


def record_document(record: LinkRecord) -> dict[str, object]:
    """Return a record as a JSON-ready dictionary, as it is saved and printed."""
    trials = {
        f"{means}/{place}": trial_document(trial) for (means, place), trial in record.trials.items()
    }
    return {"date": record.date, "trials": trials}


def trial_document(trial: TrialRecord) -> dict[str, object]:
    """Return the result for one route as a JSON-ready dictionary."""
    seconds = {str(n): s for n, s in trial.seconds.items()}
    return {
        "verdict": trial.verdict, "why": trial.why, "seconds": seconds, "lanes": [*trial.lanes]
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _SavedRecord:
    date: str
    trials: Mapping[str, TrialRecord]


def record_from(document: object) -> LinkRecord | None:
    """Return the record in a JSON document; None if the document is invalid."""
    try:
        saved = read_document(_SavedRecord, document)
        trials = {_KEYS[key]: trial for key, trial in saved.trials.items()}
    except (WrongValue, KeyError):
        return None
    return LinkRecord(saved.date, trials)


def trial_from(entry: object) -> TrialRecord | None:
    """Return the result for one route from its JSON; None if that is invalid."""
    try:
        trial = read_document(TrialRecord, entry)
    except WrongValue:
        return None
    return replace(trial, why=trial.why[:200])


_KEYS: Mapping[object, tuple[Means, Place]] = {
    f"{means}/{place}": (means, place) for means in get_args(Means) for place in get_args(Place)
}
