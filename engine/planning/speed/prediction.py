"""Predicted time of a token or a prompt, by rank and cause, with a sentence that explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar

from engine.hardware.devices.places import is_cpu, local_id, machine_of

Cause = Literal["memory", "compute", "fixed", "wait", "link", "idle"]

WORTH_SAYING = 0.15
"""Least part of the time for which waiting for one device is given as the reason."""

T = TypeVar("T", "RankTime", "Path")


@dataclass(frozen=True, slots=True)
class RankTime:
    """Predicted time of one rank by cause, in seconds; the rest of the whole time is the host's.

    Attributes:
        rank: number of the rank.
        device: id of its device.
        memory_s: time of reading weights, keys and values.
        compute_s: time of multiplying, where that takes longer than reading.
        fixed_s: time that matrices cost however small they are.
        wait_s: time of waiting for slower ranks of its group.
        link_s: time of exchanges with other ranks.
        idle_s: time in which other groups compute.
        waited_s: time in which others wait for this rank alone; a part of the times above.
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
        """Time in which the rank computes, in seconds."""
        return self.memory_s + self.compute_s + self.fixed_s

    @property
    def limited_by(self) -> Cause:
        """Cause that takes most of the rank's time."""
        causes: tuple[Cause, ...] = ("memory", "compute", "fixed", "wait", "link", "idle")
        return max(causes, key=lambda cause: float(getattr(self, f"{cause}_s")))


@dataclass(frozen=True, slots=True)
class Path:
    """Predicted time along the slowest rank of each step, by cause, in seconds: the whole time.

    Attributes:
        memory_s: time of reading weights, keys and values.
        compute_s: time of multiplying, where that takes longer than reading.
        fixed_s: time that matrices cost however small they are.
        link_s: time of exchanges between ranks.
        host_s: time between forward passes: sampling, Python.
    """

    memory_s: float = 0.0
    compute_s: float = 0.0
    fixed_s: float = 0.0
    link_s: float = 0.0
    host_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time of some tokens on a split.

    Attributes:
        n_tokens: number of tokens.
        seconds: time of all of them.
        ranks: times of each rank, in rank order.
        path: `seconds` by cause.
    """

    n_tokens: int
    seconds: float
    ranks: tuple[RankTime, ...]
    path: Path

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second; 0 where `seconds` is."""
        return self.n_tokens / self.seconds if self.seconds > 0 else 0.0

    def part(self, seconds: float) -> float:
        """Return some seconds as a part of all."""
        return seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def reason(self) -> str:
        """Sentence that says what limits the speed."""
        slow = max(self.ranks, key=lambda rank: rank.waited_s)
        waited = self.part(slow.waited_s)
        if waited >= WORTH_SAYING:
            name = self._name(slow)
            is_pair = len(self.ranks) == 2
            slow_is = "slower; the other waits" if is_pair else "slowest; the others wait"
            return (
                f"{name[0].upper()}{name[1:]} is {slow_is} for it {_percent(waited)} of the time."
            )
        path = {spec.name: getattr(self.path, spec.name) for spec in fields(Path)}
        cause = max(path, key=lambda name: path[name])
        return REASONS[cause].format(part=_percent(self.part(path[cause])))

    def _name(self, rank: RankTime) -> str:
        """Return what the user calls a rank: "GPU 1", "the CPU", "CPU 0", "GPU 1 (rank 2)"."""
        alike = [other.rank for other in self.ranks if other.device == rank.device]
        return rank_name(rank.device, rank.rank, alike)

    def scaled(self, factor: float) -> Prediction:
        """Return the prediction with all times multiplied by `factor`."""
        return replace(
            self,
            seconds=self.seconds * factor,
            ranks=tuple(_scaled(rank, factor) for rank in self.ranks),
            path=_scaled(self.path, factor),
        )


REASONS = {
    "memory_s": "Limited by memory bandwidth: reading takes {part} of the time.",
    "compute_s": "Limited by compute: multiplying takes {part} of the time.",
    "fixed_s": "Limited by the overhead of operations, which takes {part} of the time.",
    "link_s": "Limited by the links: exchanges between devices take {part} of the time.",
    "host_s": "Limited by the work between tokens, such as sampling: {part} of the time.",
}


def device_name(device: str) -> str:
    """Return what the user calls a device within a sentence: "GPU 1" or "the CPU".

    People count machines from 1: "GPU 0 of machine 2".
    """
    kind, _, number = local_id(device).partition(":")
    where = f" of machine {machine_of(device) + 1}" if machine_of(device) else ""
    return (f"GPU {number}" if kind == "cuda" else "the CPU") + where


def rank_name(device: str, rank: int, alike: Sequence[int]) -> str:
    """Return what the user calls a rank within a sentence, as beside the split's handles.

    Args:
        alike: the ranks on its device, itself included, in order.
    """
    if len(alike) == 1:
        return device_name(device)
    if is_cpu(device) and not machine_of(device):
        return f"CPU {alike.index(rank)}"
    return f"{device_name(device)} (rank {rank})"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _scaled(times: T, factor: float) -> T:
    """Return a copy with all fields in seconds multiplied by a factor."""
    names = [spec.name for spec in fields(times) if spec.name.endswith("_s")]
    return replace(times, **{name: factor * getattr(times, name) for name in names})
