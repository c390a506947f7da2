"""Trials and result of a measured search; choice of the best trial and its explanation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from types import MappingProxyType

from engine.errors import Sentence, listed, paragraph
from engine.hardware.fallbacks import Fallback
from engine.load_params import LoadParams
from engine.planning.speed.facts import device_name, percent, rank_name

SOURCES = {
    "ngram": Sentence("from the text"),
    "mtp": Sentence("from the model's own block (MTP)"),
    "model": Sentence("from the draft model"),
}
"""Names of the sources of draft tokens, for use in sentences."""

MIN_GAIN = 1.03
"""Smallest gain from draft tokens that is reported; single answers vary by a few percent."""


@dataclass(frozen=True, slots=True)
class DraftTrial:
    """Tokens per second of output with one source of draft tokens.

    Attributes:
        way: "ngram", "mtp" or "model"; "off" if there are no draft tokens.
        prose_ts: speed when writing new text.
        quoting_ts: speed when repeating parts of the prompt, as in edited code.
    """

    way: str
    prose_ts: float
    quoting_ts: float


def reason_for_drafts(trials: Sequence[DraftTrial]) -> str:
    """Return sentences on which source of draft tokens pays off; "" if nothing was compared."""
    plain = next((trial for trial in trials if trial.way == "off"), None)
    if plain is None or len(trials) < 2:
        return ""
    gains = {
        trial.way: (trial.prose_ts / plain.prose_ts, trial.quoting_ts / plain.quoting_ts)
        for trial in trials
        if trial is not plain
    }
    best = max(gains, key=lambda way: sum(gains[way]))
    speeds = [
        Sentence(
            "With draft tokens {way}, new text is {prose:.2f} times as fast, and repeated text"
            " {quoting:.2f} times as fast.",
            way=SOURCES[way], prose=prose, quoting=quoting,
        )
        for way, (prose, quoting) in gains.items()
    ]  # fmt: skip
    if max(gains[best]) < MIN_GAIN:
        return paragraph(Sentence("Speculative decoding does not pay off here."), *speeds)
    winner = (
        Sentence("The best draft tokens come {way}.", way=SOURCES[best]) if len(gains) > 1 else ""
    )
    return paragraph(Sentence("Speculative decoding pays off here."), *speeds, winner)


@dataclass(frozen=True, slots=True)
class Goal:
    """A typical request; splits are compared by its duration, which includes prefill and decode."""

    name: str
    n_prompt: int
    n_gen: int

    def seconds(self, prefill_ts: float, decode_ts: float) -> float:
        """Return how long the request takes, in seconds, at these speeds in tokens per second."""
        if prefill_ts <= 0 or decode_ts <= 0:
            return inf
        return self.n_prompt / prefill_ts + self.n_gen / decode_ts


GOALS: Mapping[str, Goal] = MappingProxyType(
    {"chat": Goal("chat", 256, 256), "prompts": Goal("prompts", 4096, 128)}
)
"""The goals by name. A chat's prompt is about as long as its answer, since earlier messages stay in
the KV cache; "prompts" stands for long documents with a short answer."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second in prefill and decode."""

    prefill_ts: float
    decode_ts: float


@dataclass(frozen=True, slots=True)
class Sample:
    """Measured speeds of a split.

    Attributes:
        prefill_ts, decode_ts: tokens per second in each repetition.
        busy_s: seconds per token in which each rank computes; empty if not measured.
        waited_s: seconds per token in which each rank waits for others; empty if not measured.
        fallbacks: reasons for lower speed on GPUs.
    """

    prefill_ts: tuple[float, ...]
    decode_ts: tuple[float, ...]
    busy_s: tuple[float, ...] = ()
    waited_s: tuple[float, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()

    def joined(self, other: Sample) -> Sample:
        """Return a sample with the repetitions of both and the ranks' times from the later one."""
        return Sample(
            self.prefill_ts + other.prefill_ts, self.decode_ts + other.decode_ts,
            other.busy_s or self.busy_s, other.waited_s or self.waited_s,
            tuple(dict.fromkeys(self.fallbacks + other.fallbacks)),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trial:
    """A measured split.

    Attributes:
        shares: actual share of each rank, 0 to 1.
        sample: measured speeds; None if the split could not run.
        problem: why the split could not run; the search then skips it.
        is_final: whether `sample` is from the final round, in which the best few take turns.
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
        """Median tokens per second in prefill; 0 if the split could not run."""
        return median(self.sample.prefill_ts) if self.sample else 0.0

    @property
    def decode_ts(self) -> float:
        """Median tokens per second in decode; 0 if the split could not run."""
        return median(self.sample.decode_ts) if self.sample else 0.0

    @property
    def prefill_spread(self) -> float:
        """Half the range of prefill speeds, relative to their median."""
        return _spread(self.sample.prefill_ts) if self.sample else 0.0

    @property
    def decode_spread(self) -> float:
        """Half the range of decode speeds, relative to their median."""
        return _spread(self.sample.decode_ts) if self.sample else 0.0

    def seconds(self, goal: Goal) -> float:
        """Return how long the goal's request takes; infinite if the split could not run."""
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
    """Splits over two devices that do not fit: those with a first share from `start` to `stop`."""

    devices: tuple[str, ...]
    split_mode: str
    start: float
    stop: float
    problem: str


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The result of a search.

    Attributes:
        model_hash: hash of the model; see `engine.formats.gguf.reader`.
        device_set: key of the devices; see `engine.planning.speed.forecast.device_set`.
        trials: all trials in order; a repeated trial is listed once.
        regions: splits skipped for lack of memory, for the chart.
        best: index into `trials`; None if none could run.
        is_complete: False if time ran out or the search was cancelled.
        when: time at which the search ended, in UTC, in ISO 8601 format.
        others: (device, load in percent) for devices that other programs were using at the start.
        drafts: the best split's speeds with each source of draft tokens; empty if not measured.
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
        """Sentences on how comparable the speeds are; may be empty."""
        return paragraph(_note_on_rounds(self), _note_on_others(self.others))

    @property
    def winner(self) -> Trial | None:
        """Best trial; None if none could run."""
        return None if self.best is None else self.trials[self.best]


def _note_on_rounds(result: TuneResult) -> str:
    # a trial that looks faster than the winner needs an explanation
    winner = result.winner
    if winner is None or len(_compared(result.trials)) == len(_ran(result.trials)):
        return ""
    if all(trial.decode_ts <= winner.decode_ts for trial in result.trials):
        return ""
    return Sentence(
        "Only splits measured in turn at the end are compared, because single runs vary with the"
        " machine's other load."
    )


def _note_on_others(others: Sequence[tuple[str, float]]) -> str:
    if not others:
        return ""
    used = [
        Sentence("{device} ({percent:.0f} %)", device=device_name(device), percent=load)
        for device, load in others
    ]
    return Sentence(
        "Other programs were using {devices} when the search began, so these speeds may be too"
        " low.",
        devices=listed(used),
    )


MIN_DIFFERENCE = 0.02
"""Relative difference in time below which splits count as equally fast."""


def best_of(trials: Sequence[Trial], goal: Goal) -> int | None:
    """Return the index of the best trial: the fastest, or an equally fast one with fewer devices.

    If several took turns in a final round, it is one of these, because a machine's speed drifts.
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
    ran = _ran(trials)
    final = [trial for trial in ran if trial.is_final]
    return final if len(final) > 1 else ran


def _ran(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.sample is not None]


def difference(trial: Trial, goal: Goal) -> float:
    """Return the relative difference in time above which another trial counts as slower."""
    return max(MIN_DIFFERENCE, trial.uncertainty(goal))


def reason_for_best(trials: Sequence[Trial], goal: Goal) -> str:
    """Return why the best trial won, in one or two sentences."""
    best = best_of(trials, goal)
    if best is None:
        return Sentence(
            "No split could be run: the devices have too little memory for this context."
        )
    winner, trials = trials[best], _compared(trials)
    if len(winner.devices) == 1:
        return _one_won(winner, trials, goal)
    return _several_won(winner, trials, goal)


def _one_won(winner: Trial, trials: Sequence[Trial], goal: Goal) -> str:
    values = {"devices": names(winner.devices, begins=True), **_rates(winner)}
    split = _quickest([t for t in trials if len(t.devices) > 1], goal)
    if split is None:
        return Sentence(
            "{devices} alone gives {rate} tok/s ({prompts} tok/s for prompts), more than any other"
            " device."
            if any(t.devices != winner.devices for t in trials)
            else "{devices} alone gives {rate} tok/s ({prompts} tok/s for prompts); nothing else"
            " could be run.",
            **values,
        )
    values |= {"others": names(split.devices), **_rates(split, "other_")}
    if split.seconds(goal) <= winner.seconds(goal) * (1 + difference(winner, goal)):
        return Sentence(
            "{devices} alone gives {rate} tok/s ({prompts} tok/s for prompts); the best split, over"
            " {others}, gives {other_rate} tok/s ({other_prompts} tok/s for prompts). The"
            " difference is negligible, so fewer devices are used.",
            **values,
        )
    lost = Sentence(
        "{devices} alone gives {rate} tok/s ({prompts} tok/s for prompts); the best split, over"
        " {others}, gives {other_rate} tok/s ({other_prompts} tok/s for prompts).",
        **values,
    )
    return paragraph(lost, _why_slow(split))


def _several_won(winner: Trial, trials: Sequence[Trial], goal: Goal) -> str:
    values = {
        "devices": names(winner.devices),
        "shares": " + ".join(map(percent, winner.shares)),
        **_rates(winner),
    }
    single = _quickest([t for t in trials if len(t.devices) == 1], goal)
    if single is None:
        other = _quickest([t for t in trials if t is not winner], goal)
        return Sentence(
            "Splitting over {devices} at {shares} gives {rate} tok/s ({prompts} tok/s for prompts);"
            " no single device can hold the model."
            if other is None
            else "Splitting over {devices} at {shares} gives {rate} tok/s ({prompts} tok/s for"
            " prompts); the next best split gives {other_rate} tok/s ({other_prompts} tok/s for"
            " prompts). No single device can hold the model.",
            **values,
            **({} if other is None else _rates(other, "other_")),
        )
    won = Sentence(
        "Splitting over {devices} at {shares} gives {rate} tok/s ({prompts} tok/s for prompts);"
        " {others} alone gives {other_rate} tok/s ({other_prompts} tok/s for prompts).",
        **values, others=names(single.devices), **_rates(single, "other_"),
    )  # fmt: skip
    gain = single.seconds(goal) / winner.seconds(goal)
    together = Sentence(
        "Together they take {part} of that time, because each reads and computes only its part.",
        part=percent(1 / gain),
    )
    return paragraph(won, together)


def _quickest(trials: Sequence[Trial], goal: Goal) -> Trial | None:
    return min(trials, key=lambda trial: trial.seconds(goal), default=None)


def _why_slow(trial: Trial) -> str:
    # the rank that others waited for most, if measured; otherwise the predicted bottleneck
    sample = trial.sample
    if sample is None or not sample.waited_s or not trial.decode_ts:
        return trial.predicted_reason
    longest = max(range(len(sample.waited_s)), key=lambda rank: sample.waited_s[rank])
    part = sample.waited_s[longest] * trial.decode_ts
    if part < 0.1:
        return trial.predicted_reason
    devices = trial.params.all_devices
    ranks = [rank for rank, device in enumerate(devices) if device == devices[longest]]
    return Sentence(
        "In that split, {devices} waits for others {part} of the time.",
        devices=rank_name(devices[longest], longest, ranks),
        part=percent(min(1.0, part)),
    )


def names(devices: Sequence[str], *, begins: bool = False) -> str:
    """Return device names for a sentence: "GPU 0 and the CPU", or "The CPU" if they begin it."""
    counted = {device: list(devices).count(device) for device in devices}
    return listed(
        [
            device_name(device, begins=begins and not at)
            if n == 1
            else Sentence("{n} ranks on {device}", n=n, device=device_name(device))
            for at, (device, n) in enumerate(counted.items())
        ]
    )


def _rates(trial: Trial, prefix: str = "") -> dict[str, str | int | float]:
    rates = {"rate": round(trial.decode_ts, 1), "prompts": round(trial.prefill_ts)}
    return {prefix + name: rate for name, rate in rates.items()}
