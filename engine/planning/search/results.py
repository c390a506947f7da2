"""Trials and result of a measured search, the choice of the best trial, and its explanation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from types import MappingProxyType

from engine.hardware.fallbacks import Fallback
from engine.load_params import LoadParams
from engine.planning.speed.facts import device_name, rank_name

WAYS = {
    "ngram": "from the text",
    "mtp": "by the model's own block (MTP)",
    "model": "by the draft model",
}
"""Ways of guessing, as sentences name them; "off" is that without."""

MIN_GAIN = 1.03
"""Gain from which on guesses are said to pay: speeds of single answers vary by some percent."""


@dataclass(frozen=True, slots=True)
class DraftTrial:
    """Tokens per second of answers with one way of guessing.

    Attributes:
        way: "off" without guesses, or "ngram", "mtp" or "model".
        prose_ts: speed of new text.
        quoting_ts: speed of text that stands in the prompt, such as code that is edited.
    """

    way: str
    prose_ts: float
    quoting_ts: float


def reason_for_drafts(trials: Sequence[DraftTrial]) -> str:
    """Return which guesses pay, as a sentence; "" if nothing was compared."""
    plain = next((trial for trial in trials if trial.way == "off"), None)
    if plain is None or len(trials) < 2:
        return ""
    gains = {
        trial.way: (trial.prose_ts / plain.prose_ts, trial.quoting_ts / plain.quoting_ts)
        for trial in trials
        if trial is not plain
    }
    best = max(gains, key=lambda way: sum(gains[way]))
    told = " ".join(
        f"With those {WAYS[way]}, new text is {prose:.2f} times as fast and repeated text"
        f" {quoting:.2f} times."
        for way, (prose, quoting) in gains.items()
    )
    if max(gains[best]) < MIN_GAIN:
        return f"Guessed tokens do not pay here. {told}"
    end = f" The best are those {WAYS[best]}." if len(gains) > 1 else ""
    return f"Guessed tokens pay here. {told}{end}"


@dataclass(frozen=True, slots=True)
class Goal:
    """A typical request, which the best split answers in the least time.

    Splits are compared by its seconds, so that prompts and answers are weighed as they are used.

    Attributes:
        name: name by which the user chooses it.
        n_prompt: number of prompt tokens, computed at once.
        n_gen: number of generated tokens.
    """

    name: str
    n_prompt: int
    n_gen: int

    def seconds(self, prefill_ts: float, decode_ts: float) -> float:
        """Return the request's time in seconds at these speeds in tokens per second."""
        if prefill_ts <= 0 or decode_ts <= 0:
            return inf
        return self.n_prompt / prefill_ts + self.n_gen / decode_ts


GOALS: Mapping[str, Goal] = MappingProxyType(
    {"chat": Goal("chat", 256, 256), "prompts": Goal("prompts", 4096, 128)}
)
"""The goals by name. A chat's prompt is about as long as its answer, since earlier messages stay in
the cache; "prompts" are long documents with a short answer."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second of prefill and decode."""

    prefill_ts: float
    decode_ts: float


@dataclass(frozen=True, slots=True)
class Sample:
    """Measured speeds of a split.

    Attributes:
        prefill_ts, decode_ts: tokens per second of each repetition.
        busy_s: seconds of a token in which each rank computes; empty where not measured.
        waited_s: seconds of a token in which each rank waits for others; empty where not measured.
        fallbacks: what made GPUs slower than they could be.
    """

    prefill_ts: tuple[float, ...]
    decode_ts: tuple[float, ...]
    busy_s: tuple[float, ...] = ()
    waited_s: tuple[float, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()

    def joined(self, other: Sample) -> Sample:
        """Return a sample with the repetitions of both, and the ranks' times of the later one."""
        return Sample(
            self.prefill_ts + other.prefill_ts,
            self.decode_ts + other.decode_ts,
            other.busy_s or self.busy_s,
            other.waited_s or self.waited_s,
            tuple(dict.fromkeys(self.fallbacks + other.fallbacks)),
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """One split that was tried.

    Attributes:
        params: parameters that it was loaded with.
        shares: share that each rank really got, 0 to 1.
        sample: measured speeds; None where it could not run.
        predicted: predicted speeds; None where there were none.
        predicted_reason: sentence that says what was expected to limit it.
        problem: reason why it could not run, which is no error: the search goes around it.
        is_final: whether `sample` is from the end, when the best few were measured in turn.
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
        """Devices of the split."""
        return self.params.devices

    @property
    def prefill_ts(self) -> float:
        """Median tokens per second of prefill; 0 where the split could not run."""
        return median(self.sample.prefill_ts) if self.sample else 0.0

    @property
    def decode_ts(self) -> float:
        """Median tokens per second of decode; 0 where the split could not run."""
        return median(self.sample.decode_ts) if self.sample else 0.0

    @property
    def prefill_spread(self) -> float:
        """Half the range of prefill speeds over the repetitions, as a part of their median."""
        return _spread(self.sample.prefill_ts) if self.sample else 0.0

    @property
    def decode_spread(self) -> float:
        """Half the range of decode speeds over the repetitions, as a part of their median."""
        return _spread(self.sample.decode_ts) if self.sample else 0.0

    def seconds(self, goal: Goal) -> float:
        """Return the time of the goal's request; infinite where the split could not run."""
        return goal.seconds(self.prefill_ts, self.decode_ts)

    def uncertainty(self, goal: Goal) -> float:
        """Return the relative uncertainty of `seconds`."""
        if self.sample is None:
            return 0.0
        prefill = goal.n_prompt / self.prefill_ts * self.prefill_spread
        decode = goal.n_gen / self.decode_ts * self.decode_spread
        return (prefill + decode) / self.seconds(goal)


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / 2 / median(values)


@dataclass(frozen=True, slots=True)
class Region:
    """Splits over two devices that do not fit: the first one's share from `start` to `stop`.

    Attributes:
        problem: sentence that says why they cannot be used.
    """

    devices: tuple[str, ...]
    split_mode: str
    start: float
    stop: float
    problem: str


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The result of a search.

    Attributes:
        model_name: name that the model's file gives.
        model_hash: hash of the model, see `engine.formats.gguf.reader`.
        n_ctx: context of the trials, in tokens.
        device_set: key of the devices, see `engine.planning.speed.forecast.device_set`.
        goal: request that was to be fast.
        trials: all trials in order; a repeated one stands once.
        regions: splits that the search left out for lack of memory, to be drawn.
        best: index into `trials`; None if none could run.
        reason: one or two sentences that say why it won.
        seconds: duration of the search.
        is_complete: whether the search ended by itself, not by time or cancellation.
        when: its end in UTC, as in ISO 8601.
        others: (device, load in percent) of devices that other programs used when it began.
        drafts: speeds of the best split with each way of guessing; none if they were not measured.
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
    others: tuple[tuple[str, float], ...] = ()
    drafts: tuple[DraftTrial, ...] = ()

    @property
    def note(self) -> str:
        """Sentences on how far the speeds can be compared; "" if there is nothing to say."""
        return " ".join(filter(None, (_note_on_rounds(self), _note_on_others(self.others))))

    @property
    def winner(self) -> Trial | None:
        """Best trial; None if none could run."""
        return None if self.best is None else self.trials[self.best]


def _note_on_rounds(result: TuneResult) -> str:
    """Return why a trial that looks faster than the winner is not it."""
    winner = result.winner
    if winner is None or len(_compared(result.trials)) == len(_ran(result.trials)):
        return ""
    if all(trial.decode_ts <= winner.decode_ts for trial in result.trials):
        return ""
    return (
        "Only splits that were measured in turns at the end are compared: speeds of one run"
        " vary with what else the machine does."
    )


def _note_on_others(others: Sequence[tuple[str, float]]) -> str:
    if not others:
        return ""
    used = " and ".join(f"{device_name(device)} ({load:.0f} %)" for device, load in others)
    return (
        f"Other programs used {used} when the search began, so these speeds may be lower than"
        " they could be."
    )


MIN_DIFFERENCE = 0.02
"""Relative difference in time below which splits count as equally fast."""


def best_of(trials: Sequence[Trial], goal: Goal) -> int | None:
    """Return the index of the best trial: the fastest, or one as fast with fewer devices.

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
    """Return the trials measured in turn, if there are several, else all that ran."""
    ran = _ran(trials)
    final = [trial for trial in ran if trial.is_final]
    return final if len(final) > 1 else ran


def _ran(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.sample is not None]


def difference(trial: Trial, goal: Goal) -> float:
    """Return the relative difference in time from which on another trial counts as slower."""
    return max(MIN_DIFFERENCE, trial.uncertainty(goal))


def reason_for_best(trials: Sequence[Trial], goal: Goal) -> str:
    """Return why the best trial is the best, in one or two sentences."""
    best = best_of(trials, goal)
    if best is None:
        return "No split could be run: the devices have too little memory for this context."
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
            return f"{won}; nothing else could be run."
        return f"{won}, more than any other device."
    lost = f"the best split, over {names(split.devices)}, gives {_rate(split)}"
    if split.seconds(goal) <= winner.seconds(goal) * (1 + difference(winner, goal)):
        return f"{won}, {lost}: no real difference, so the fewer devices are used."
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
        f"{100 / gain:.0f} % of its time, because each reads and computes only its part."
    )


def _quickest(trials: Sequence[Trial], goal: Goal) -> Trial | None:
    return min(trials, key=lambda trial: trial.seconds(goal), default=None)


def _why_slow(trial: Trial) -> str:
    """Return which rank waited most, as measured, else what was expected to limit the split."""
    sample = trial.sample
    if sample is None or not sample.waited_s or not trial.decode_ts:
        return trial.predicted_reason
    longest = max(range(len(sample.waited_s)), key=lambda rank: sample.waited_s[rank])
    part = sample.waited_s[longest] * trial.decode_ts
    if part < 0.1:
        return trial.predicted_reason
    devices = trial.params.all_devices
    alike = [rank for rank, device in enumerate(devices) if device == devices[longest]]
    one = rank_name(devices[longest], longest, alike)
    return f"There {one} waits for others {_percent(min(1.0, part))} of the time."


def names(devices: Sequence[str]) -> str:
    """Return what the user calls some devices: "GPU 0 and the CPU", "2 ranks on the CPU"."""
    counted = {device: list(devices).count(device) for device in devices}
    found = [
        device_name(device) if n == 1 else f"{n} ranks on {device_name(device)}"
        for device, n in counted.items()
    ]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}"


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _rate(trial: Trial) -> str:
    return f"{trial.decode_ts:.1f} tok/s ({trial.prefill_ts:.0f} tok/s for prompts)"


def _percents(shares: Sequence[float]) -> str:
    return " + ".join(map(_percent, shares))


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"
