"""What came of trying the ways between two GPUs, which way follows from it, and what to say of it.

No torch: what is kept on disk is shown without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from engine.config import PeerMode
from engine.devices.routes import Place, Way
from engine.planning.speed.facts import LinkFacts

Verdict = Literal["passed", "lost", "wrong", "hung", "crashed", "refused"]
"""What came of a trial: all arrived; something did not; something else did; it did not end; the
program that made it did not live; it could not be begun."""

Means = Literal["stores", "copies", "nccl"]
"""What brings the values: kernels that write them, copies, or NCCL, which goes its own ways."""

MEANS: tuple[Means, ...] = ("stores", "copies")
"""What a model needs; NCCL is a matter of speed."""

NCCL: tuple[Means, Place] = ("nccl", "peer")

TOKEN_SUM_BYTES = 16 << 10
"""The sum of a token: 4096 numbers."""

COVERED_BYTES = 32 << 10
"""What is sent within the latency of a small sum."""

SLOW_STORES = 0.1
"""Of the speed of copies: kernels that write slower than that have something in their way."""

TELLING_BYTES = 128 << 10
"""Of what kernels write: so many show how fast they write."""

FEW_LANES = 4
"""Of a slot: with so many or fewer it is one for other cards, or by way of the chipset."""

TRIES_AGAIN = "'tandem devices --measure' tries again"


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """What came of one way in one direction.

    Attributes:
        why: what was seen, as half a sentence; "" where it passed.
        seconds: by payload in bytes: of an exchange in which both write as much (stores), or of a
            copy while one goes the other way (copies).
        lanes: generation and width of the source's slot right after copies; zeros if not known.
    """

    verdict: Verdict
    why: str = ""
    seconds: Mapping[int, float] = field(default_factory=dict)
    lanes: tuple[int, int] = (0, 0)

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """All ways in one direction.

    Attributes:
        date: of the day on which they were tried, such as 2026-03-01.
        trials: by means and place; those that were not tried are missing.
    """

    date: str
    trials: Mapping[tuple[Means, Place], TrialRecord] = field(default_factory=dict)

    def passed(self, means: Means, place: Place) -> bool:
        trial = self.trials.get((means, place))
        return trial is not None and trial.passed


def chosen_way(record: LinkRecord | None, p2p: PeerMode) -> Way:
    """The way to use, of what was tried.

    "auto" takes the faster one of two that passed: some machines read each other's memory well and
    write it badly. Copies by way of the host need no proof: drivers make them from two that always
    work.
    """
    if record is None:
        return Way(None, "host")
    stores = _chosen(record, "stores", p2p)
    return Way(stores, _chosen(record, "copies", p2p) or "host")


def nccl_pays(there: LinkRecord, back: LinkRecord, p2p: PeerMode) -> bool:
    """Whether two GPUs may exchange much by NCCL, and are faster so than by copies.

    NCCL decides by itself whether one writes the other's memory, so that must have passed.
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
    by_peer, by_host = (record.passed(means, place) for place in ("peer", "host"))
    if not by_peer or p2p == "off":
        return "host" if by_host else None
    if p2p == "on" or not by_host:
        return "peer"
    peer, host = (_typical_s(record.trials[means, place], means) for place in ("peer", "host"))
    return "host" if host < peer else "peer"


def _typical_s(trial: TrialRecord, means: Means) -> float:
    """Of what is usually sent: little by stores, much by copies; 0 where nothing was measured."""
    if means == "copies":
        return trial.seconds[max(trial.seconds)] if trial.seconds else 0.0
    known = [n for n in trial.seconds if n >= TOKEN_SUM_BYTES]
    return trial.seconds[min(known)] if known else 0.0


def speed_of(record: LinkRecord, way: Way) -> LinkFacts | None:
    """Latency and bandwidth of the way that is used; None where they were not measured."""
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


def link_problems(source: str, goal: str, record: LinkRecord, p2p: PeerMode) -> tuple[str, ...]:
    """What a person should know of a direction, as sentences."""
    said = []
    for (means, place), trial in record.trials.items():
        is_missed = (means, place) != NCCL or trial.verdict != "refused"  # many do without it
        if not trial.passed and is_missed and not (place == "peer" and p2p == "off"):
            said.append(_failure(source, goal, means, place, trial, record.date))
    said += filter(None, (_slowness(source, goal, record, chosen_way(record, p2p)),))
    said += filter(None, (_narrowness(source, record),))
    return tuple(said)


def _failure(
    source: str, goal: str, means: Means, place: Place, trial: TrialRecord, date: str
) -> str:
    what = {
        ("stores", "peer"): f"What kernels on {source} write to the memory of {goal}",
        ("stores", "host"): f"What kernels on {source} write to the host's memory for {goal}",
        ("copies", "peer"): f"What {source} copies straight to {goal}",
        ("copies", "host"): f"What {source} copies to {goal} by way of the host",
        NCCL: f"What NCCL brings from {source} to {goal}",
    }[means, place]
    instead = {
        ("stores", "peer"): "the host's memory is used instead",
        ("copies", "peer"): "the host's memory is used instead",
        ("stores", "host"): "copies are used instead",
        ("copies", "host"): "what is computed there may be wrong",
        NCCL: "it is not used",
    }[means, place]
    detail = f" ({trial.why})" if trial.why else ""
    if trial.verdict == "refused":
        return f"{what} was not tried{detail}; {instead}."
    seen = {
        "lost": "does not arrive", "wrong": "arrives damaged", "hung": "never came to an end",
        "crashed": "ended the program that tried it",
    }[trial.verdict]  # fmt: skip
    again = f"; {TRIES_AGAIN}" if trial.verdict in ("hung", "crashed") else ""
    return f"{what} {seen}{detail}, as tried on {date}; {instead}{again}."


def _slowness(source: str, goal: str, record: LinkRecord, way: Way) -> str:
    """Whether kernels write much slower than copies bring the same, as a sentence; or ""."""
    stores = record.trials.get(("stores", way.stores)) if way.stores else None
    copies = record.trials.get(("copies", way.copies))
    if stores is None or copies is None or not copies.seconds:
        return ""
    if max(stores.seconds, default=0) < TELLING_BYTES:  # it is latency that counts below
        return ""
    rates = [max(t.seconds) / t.seconds[max(t.seconds)] for t in (stores, copies)]
    if rates[0] >= SLOW_STORES * rates[1]:
        return ""
    return (
        f"Kernels on {source} write to {goal} at {rates[0] / 1e9:.2g} GB/s, while copies bring "
        f"{rates[1] / 1e9:.2g} GB/s; sums of a token are slower than they could be."
    )


def _narrowness(source: str, record: LinkRecord) -> str:
    """Whether a device sits in a slot that is slow at work, as a sentence; or ""."""
    known = [trial.lanes for trial in record.trials.values() if all(trial.lanes)]
    if not known:
        return ""
    generation, width = max(known, key=lambda lanes: lanes[0] * lanes[1])
    if generation > 1 and width > FEW_LANES:
        return ""
    return (
        f"The slot of {source} runs as PCIe {generation}.0 x{width} at work; another slot, a riser "
        "or a setting of the mainboard may give it more."
    )


def record_document(record: LinkRecord) -> dict[str, object]:
    """As it is kept and printed."""
    trials = {
        f"{means}/{place}": trial_document(trial) for (means, place), trial in record.trials.items()
    }
    return {"date": record.date, "trials": trials}


def trial_document(trial: TrialRecord) -> dict[str, object]:
    """What came of one way, for JSON."""
    seconds = {str(n): s for n, s in trial.seconds.items()}
    return {
        "verdict": trial.verdict, "why": trial.why, "seconds": seconds, "lanes": [*trial.lanes]
    }  # fmt: skip


def record_from(document: object) -> LinkRecord | None:
    """The same back; None where it makes no sense."""
    if not isinstance(document, Mapping) or not isinstance(document.get("date"), str):
        return None
    entries = document.get("trials")
    if not isinstance(entries, Mapping):
        return None
    trials: dict[tuple[Means, Place], TrialRecord] = {}
    for key, entry in entries.items():
        names = _KEYS.get(key)
        trial = trial_from(entry)
        if names is None or trial is None:
            return None
        trials[names] = trial
    return LinkRecord(document["date"], trials)


def trial_from(entry: object) -> TrialRecord | None:
    """What came of one way, from its document; None where it makes no sense."""
    if not isinstance(entry, Mapping) or entry.get("verdict") not in get_args(Verdict):
        return None
    why, seconds = entry.get("why", ""), entry.get("seconds", {})
    if not isinstance(why, str) or not isinstance(seconds, Mapping):
        return None
    measured: dict[int, float] = {}
    for n_bytes, value in seconds.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not str(n_bytes).isdecimal() or not is_number or not 0 < value < 1e6:
            return None
        measured[int(n_bytes)] = float(value)
    lanes = entry.get("lanes", (0, 0))
    is_lanes = isinstance(lanes, list | tuple) and [*map(type, lanes)] == [int, int]
    slot = (lanes[0], lanes[1]) if is_lanes else (0, 0)
    return TrialRecord(entry["verdict"], why[:200], measured, slot)


_KEYS: Mapping[object, tuple[Means, Place]] = {
    f"{means}/{place}": (means, place) for means in get_args(Means) for place in get_args(Place)
}
