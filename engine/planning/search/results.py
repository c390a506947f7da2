"""What a measured search for the best split tries and finds: numbers, and why one of them won."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from types import MappingProxyType

from engine.config import LoadParams
from engine.planning.speed.prediction import device_name


@dataclass(frozen=True, slots=True)
class Goal:
    """What a split shall be fast at: one request of so many tokens.

    Splits are compared by its seconds, so that prompts and answers are weighed as they are used.

    Attributes:
        n_prompt: tokens that are computed at once.
        n_gen: tokens that are generated.
    """

    name: str
    n_prompt: int
    n_gen: int

    def seconds(self, prefill_ts: float, decode_ts: float) -> float:
        """How long the request takes at these speeds, in tokens per second."""
        if prefill_ts <= 0 or decode_ts <= 0:
            return inf
        return self.n_prompt / prefill_ts + self.n_gen / decode_ts


GOALS: Mapping[str, Goal] = MappingProxyType(
    {"chat": Goal("chat", 256, 256), "prompts": Goal("prompts", 4096, 128)}
)
"""A chat computes about as much as it writes, since what was said before stays in the cache; long
prompts are documents with a short answer."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second of prompts and of generating."""

    prefill_ts: float
    decode_ts: float


@dataclass(frozen=True, slots=True)
class Sample:
    """What was measured of a split.

    Attributes:
        prefill_ts, decode_ts: tokens per second of each repetition.
        busy_s: seconds of a token that each rank computes; empty where that is not known.
        waited_s: the same of waiting for others.
    """

    prefill_ts: tuple[float, ...]
    decode_ts: tuple[float, ...]
    busy_s: tuple[float, ...] = ()
    waited_s: tuple[float, ...] = ()

    def joined(self, other: Sample) -> Sample:
        """With the repetitions of another one; what ranks do is that of the later one."""
        return Sample(
            self.prefill_ts + other.prefill_ts,
            self.decode_ts + other.decode_ts,
            other.busy_s or self.busy_s,
            other.waited_s or self.waited_s,
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """One split that was tried.

    Attributes:
        params: what was loaded.
        shares: what each rank really got, 0 to 1.
        sample: what was measured; None where it could not run.
        predicted: what was expected before.
        predicted_reason: what was expected to limit it, in a sentence.
        problem: why it could not run: no error, but a place where the search does not go.
        is_final: whether `sample` is of the end, where the best few were measured in turn.
    """

    params: LoadParams
    shares: tuple[float, ...]
    sample: Sample | None
    predicted: Speeds | None = None
    predicted_reason: str = ""
    problem: str = ""
    is_final: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        return self.params.devices

    @property
    def prefill_ts(self) -> float:
        """Tokens per second of prompts, the median; 0 where it could not run."""
        return median(self.sample.prefill_ts) if self.sample else 0.0

    @property
    def decode_ts(self) -> float:
        """Tokens per second of generating, the median; 0 where it could not run."""
        return median(self.sample.decode_ts) if self.sample else 0.0

    @property
    def prefill_spread(self) -> float:
        """How far repetitions lie apart, as a part of the median: half of all between the ends."""
        return _spread(self.sample.prefill_ts) if self.sample else 0.0

    @property
    def decode_spread(self) -> float:
        """The same of generating."""
        return _spread(self.sample.decode_ts) if self.sample else 0.0

    def seconds(self, goal: Goal) -> float:
        """Of the goal's request; infinite where it could not run."""
        return goal.seconds(self.prefill_ts, self.decode_ts)

    def uncertainty(self, goal: Goal) -> float:
        """The part of `seconds` by which it may be off."""
        if self.sample is None:
            return 0.0
        prefill = goal.n_prompt / self.prefill_ts * self.prefill_spread
        decode = goal.n_gen / self.decode_ts * self.decode_spread
        return (prefill + decode) / self.seconds(goal)


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / 2 / median(values)


@dataclass(frozen=True, slots=True)
class Region:
    """Splits over two devices that do not fit: the first one's share from `start` to `stop`."""

    devices: tuple[str, ...]
    split_mode: str
    start: float
    stop: float
    problem: str


@dataclass(frozen=True, slots=True)
class TuneResult:
    """What a search found.

    Attributes:
        model_name: as the file calls itself.
        model_hash: of the model, see `engine.gguf.identity`.
        n_ctx: the context that was loaded.
        device_set: what the devices are, see `engine.planning.speed.calibration.device_set`.
        trials: in order; one that was repeated stands once.
        regions: where the search did not go for lack of memory, to be drawn.
        best: index into `trials`; None if none could run.
        reason: why it won, in a sentence or two.
        is_complete: False if time ran out or it was cancelled.
        when: its end in UTC, as in ISO 8601.
    """

    model_name: str
    model_hash: str
    n_ctx: int
    device_set: str
    goal: Goal
    trials: tuple[Trial, ...]
    regions: tuple[Region, ...] = ()
    best: int | None = None
    reason: str = ""
    seconds: float = 0.0
    is_complete: bool = True
    when: str = ""

    @property
    def winner(self) -> Trial | None:
        """The trial that won."""
        return None if self.best is None else self.trials[self.best]


LEAST_DIFFERENCE = 0.02
"""Splits that differ by less, as a part of their time, count as equally fast."""


def best_of(trials: Sequence[Trial], goal: Goal) -> int | None:
    """The index of the trial to use: the fastest, but of equally fast ones that with the fewest
    devices.

    Where several were measured in turn, it is one of these: a machine changes over time.
    """
    compared = _compared(trials)
    ran = [at for at, trial in enumerate(trials) if trial in compared]
    if not ran:
        return None
    fastest = min(ran, key=lambda at: trials[at].seconds(goal))
    limit = trials[fastest].seconds(goal) * (1 + difference(trials[fastest], goal))
    good = [at for at in ran if trials[at].seconds(goal) <= limit]
    return min(good, key=lambda at: (len(trials[at].devices), trials[at].seconds(goal)))


def _compared(trials: Sequence[Trial]) -> list[Trial]:
    """Those that were measured in turn, if there are several, or else all that ran."""
    ran = [trial for trial in trials if trial.sample is not None]
    final = [trial for trial in ran if trial.is_final]
    return final if len(final) > 1 else ran


def difference(trial: Trial, goal: Goal) -> float:
    """From which part of its time on another trial is slower."""
    return max(LEAST_DIFFERENCE, trial.uncertainty(goal))


def explained(trials: Sequence[Trial], goal: Goal) -> str:
    """Why the best one is the best, in a sentence or two."""
    best = best_of(trials, goal)
    if best is None:
        return "No split could be run: the devices do not have the memory for this context."
    winner, trials = trials[best], _compared(trials)
    if len(winner.devices) == 1:
        return _one_won(winner, trials, goal)
    return _several_won(winner, trials, goal)


def _one_won(winner: Trial, trials: Sequence[Trial], goal: Goal) -> str:
    won = f"{_upper(names(winner.devices))} alone gives {_rate(winner)}"
    split = _quickest([t for t in trials if len(t.devices) > 1], goal)
    if split is None:
        others = [t for t in trials if t.devices != winner.devices]
        if not others:
            return f"{won}; nothing else could be tried."
        return f"{won}, more than any other device."
    lost = f"the best split, over {names(split.devices)}, gives {_rate(split)}"
    if split.seconds(goal) <= winner.seconds(goal) * (1 + difference(winner, goal)):
        return f"{won}, {lost}: no real difference, so the fewest devices are used."
    return f"{won}, {lost}. {_why_slow(split)}".strip()


def _several_won(winner: Trial, trials: Sequence[Trial], goal: Goal) -> str:
    where = f"{names(winner.devices)} at {_percents(winner.shares)}"
    won = f"Splitting over {where} gives {_rate(winner)}"
    single = _quickest([t for t in trials if len(t.devices) == 1], goal)
    if single is None:
        other = _quickest([t for t in trials if t is not winner], goal)
        alone = "no device holds the model alone"
        if other is None:
            return f"{won}; {alone}."
        return f"{won}, the next best split {_rate(other)}; {alone}."
    gain = single.seconds(goal) / winner.seconds(goal)
    return (
        f"{won}; {names(single.devices)} alone gives {_rate(single)}. Together they need "
        f"{100 / gain:.0f} % of its time, since each reads and computes only its part."
    )


def _quickest(trials: Sequence[Trial], goal: Goal) -> Trial | None:
    return min(trials, key=lambda trial: trial.seconds(goal), default=None)


def _why_slow(trial: Trial) -> str:
    """What was measured of its ranks, or else what was expected to limit it."""
    sample = trial.sample
    if sample is None or not sample.waited_s or not trial.decode_ts:
        return trial.predicted_reason
    longest = max(range(len(sample.waited_s)), key=lambda rank: sample.waited_s[rank])
    part = sample.waited_s[longest] * trial.decode_ts
    if part < 0.1:
        return trial.predicted_reason
    device = trial.params.all_devices[longest]
    one = device_name(device)
    if trial.params.all_devices.count(device) > 1:
        one = f"rank {longest} ({one})"
    return f"There {one} spends {_percent(min(1.0, part))} of a token waiting for others."


def names(devices: Sequence[str]) -> str:
    """Devices for people: "GPU 0 and the CPU", "two ranks on the CPU"."""
    counted = {device: list(devices).count(device) for device in devices}
    found = [
        device_name(device) if n == 1 else f"{n} ranks on {device_name(device)}"
        for device, n in counted.items()
    ]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}"


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _rate(trial: Trial) -> str:
    return f"{trial.decode_ts:.1f} t/s ({trial.prefill_ts:.0f} t/s for prompts)"


def _percents(shares: Sequence[float]) -> str:
    return " + ".join(map(_percent, shares))


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"
