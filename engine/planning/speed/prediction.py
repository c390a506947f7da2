"""Where the time of a token or a prompt goes, as predicted: numbers, and a sentence for people."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar

Cause = Literal["memory", "compute", "fixed", "wait", "link", "idle"]

WORTH_SAYING = 0.15
"""Waiting for one device is what a person hears of from this part of the time on."""

T = TypeVar("T", "RankTime", "Path")


@dataclass(frozen=True, slots=True)
class RankTime:
    """Seconds of one rank; what is left of the whole time belongs to the host.

    Attributes:
        memory_s: reading weights, keys and values.
        compute_s: multiplying, where that takes longer than reading.
        fixed_s: what matrices cost however small they are.
        wait_s: for slower ranks of its group.
        link_s: exchanges with other ranks.
        idle_s: while other groups compute.
        waited_s: how long others wait for this one alone; a part of the times above.
    """

    rank: int
    device: str
    memory_s: float
    compute_s: float
    fixed_s: float
    wait_s: float
    link_s: float
    idle_s: float
    waited_s: float

    @property
    def busy_s(self) -> float:
        """What it computes itself."""
        return self.memory_s + self.compute_s + self.fixed_s

    @property
    def limited_by(self) -> Cause:
        """What it spends most of its time with."""
        causes: tuple[Cause, ...] = ("memory", "compute", "fixed", "wait", "link", "idle")
        return max(causes, key=lambda cause: float(getattr(self, f"{cause}_s")))


@dataclass(frozen=True, slots=True)
class Path:
    """Seconds of whoever is slowest, from sum to sum: all the time there is.

    Attributes:
        host_s: between the passes: sampling, Python.
    """

    memory_s: float = 0.0
    compute_s: float = 0.0
    fixed_s: float = 0.0
    link_s: float = 0.0
    host_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """So many tokens on a split.

    Attributes:
        seconds: of all of them.
        ranks: in rank order.
        path: what `seconds` consists of.
    """

    n_tokens: int
    seconds: float
    ranks: tuple[RankTime, ...]
    path: Path

    @property
    def tokens_per_s(self) -> float:
        """The speed; 0 for a prediction of nothing."""
        return self.n_tokens / self.seconds if self.seconds > 0 else 0.0

    def part(self, seconds: float) -> float:
        """Some seconds as a part of all."""
        return seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def reason(self) -> str:
        """What limits the speed, in a sentence."""
        slow = max(self.ranks, key=lambda rank: rank.waited_s)
        waited = self.part(slow.waited_s)
        if waited >= WORTH_SAYING:
            name = self._name(slow)
            return f"{name[0].upper()}{name[1:]} is waited for {_percent(waited)} of the time."
        path = {spec.name: getattr(self.path, spec.name) for spec in fields(Path)}
        cause = max(path, key=lambda name: path[name])
        return REASONS[cause].format(part=_percent(self.part(path[cause])))

    def _name(self, rank: RankTime) -> str:
        name = device_name(rank.device)
        is_alone = sum(other.device == rank.device for other in self.ranks) == 1
        return name if is_alone else f"rank {rank.rank} ({name})"

    def scaled(self, factor: float) -> Prediction:
        """The same if everything takes `factor` times as long."""
        return replace(
            self,
            seconds=self.seconds * factor,
            ranks=tuple(_scaled(rank, factor) for rank in self.ranks),
            path=_scaled(self.path, factor),
        )


REASONS = {
    "memory_s": "Limited by memory bandwidth: reading takes {part} of the time.",
    "compute_s": "Limited by compute: multiplying takes {part} of the time.",
    "fixed_s": "Limited by the number of operations: starting and ending them takes {part} of the "
    "time.",
    "link_s": "Limited by the links: exchanges between devices take {part} of the time.",
    "host_s": "Limited by what happens between tokens, which takes {part} of the time.",
}


def device_name(device: str) -> str:
    """A device for people, within a sentence: "GPU 1" or "the CPU"."""
    kind, _, number = device.partition(":")
    return f"GPU {number}" if kind == "cuda" else "the CPU"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _scaled(times: T, factor: float) -> T:
    """All fields in seconds times a factor."""
    names = [spec.name for spec in fields(times) if spec.name.endswith("_s")]
    return replace(times, **{name: factor * getattr(times, name) for name in names})
