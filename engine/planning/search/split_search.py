"""Finding the fastest split by measuring few of them; knows neither models nor devices.

First each set of devices and mode is tried where a prediction puts its best split, the most
promising first; what is hopeless is left out. Then the best of these are refined: a share between
two devices by golden-section search (Kiefer, Proc. AMS 4, 1953) within a bracket around the
prediction, more devices by balancing what their ranks were busy with and by moving one handle after
the other (compass search: Kolda, Lewis and Torczon, SIAM Review 45, 2003). At last the best few are
repeated in turn, since a machine is busier at one time than at another, and only that counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import NamedTuple, Protocol

from engine.config import LoadParams
from engine.errors import Cancelled
from engine.planning.search.line_search import minimise
from engine.planning.search.results import Goal, Sample, Speeds, Trial, difference

HOPELESS = 1.5
"""What is expected to take so many times as long as the best so far is not tried."""

NEAR = 1.3
"""What takes at most so many times as long as the best is refined."""

MOST_REFINED = 3
FIRST_STEP, LEAST_STEP = 0.1, 0.02
"""Of a handle, as parts of its way, where two devices are split; more can cost too much time."""

COMPASS_STEPS = (0.08, 0.03)
N_FINAL, N_ROUNDS = 3, 2
MOST_BALANCED = 2

Split = tuple[float, ...]


class Infeasible(Exception):
    """A split that cannot run here: the search goes around it."""


class Candidate(NamedTuple):
    """A split that may be tried.

    Attributes:
        key: equal for those that come to the same.
        shares: what each rank really gets.
        predicted: what to expect; None where nothing is known.
        reason: what is expected to limit it.
    """

    params: LoadParams
    key: Hashable
    shares: tuple[float, ...]
    predicted: Speeds | None = None
    reason: str = ""


class Handle(Protocol):
    """The legal positions between two neighbouring ranks, in order; see `handle_positions`."""

    def __len__(self) -> int: ...

    def split(self, index: int) -> Split:
        """What to ask for at a position."""
        ...

    def nearest(self, split: Split) -> int:
        """The position that comes nearest to a split."""
        ...


@dataclass(frozen=True, slots=True)
class Family:
    """A set of devices in one mode; its members differ in shares.

    Attributes:
        params: what to load, of any split.
        start: the split that is expected to be the best.
        predicted_s: of the goal's request there.
        can_balance: whether ranks that are busy longer than others shall get less.
    """

    params: LoadParams
    start: Split
    predicted_s: float
    can_balance: bool = True

    @property
    def n_ranks(self) -> int:
        return len(self.params.devices)


class Space(Protocol):
    """What can be tried."""

    def families(self) -> Sequence[Family]:
        """All of them, the most promising first."""
        ...

    def candidate(self, family: Family, split: Split) -> Candidate | None:
        """A member of a family; None if it does not fit into memory or a rank is left out."""
        ...

    def handle(self, family: Family, split: Split, number: int) -> Handle:
        """The positions between the ranks `number` and `number` + 1 where the others stay."""
        ...


class TrialBudget:
    """How much time is left.

    Args:
        budget_s: of the whole search.
        trial_s: what one trial is expected to take, until some were measured.
        now: seconds of a clock.
    """

    def __init__(
        self, budget_s: float, trial_s: float, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._now, self._begun = now, now()
        self._budget_s, self._expected_s = budget_s, trial_s
        self._took: list[float] = []

    @property
    def spent_s(self) -> float:
        return self._now() - self._begun

    @property
    def trial_s(self) -> float:
        """What a trial takes, about; the first one also loads the model."""
        return median(self._took[1:]) if len(self._took) > 1 else self._expected_s

    def has_time_for(self, n_trials: int) -> bool:
        return self.spent_s + n_trials * self.trial_s <= self._budget_s

    def at_most(self, n_trials: int) -> int:
        """So many trials, but no more than a third of all that there is time for."""
        return min(n_trials, int(self._budget_s / self.trial_s / 3))

    def count(self, begun_s: float) -> None:
        """Note a trial that began when `begun_s` were spent and ends now."""
        self._took.append(self.spent_s - begun_s)


class _EnoughError(Exception):
    """There is no time left for what is under way."""


class SplitSearch:
    """One search.

    Args:
        measure: tries a split; raises `Infeasible` or `Cancelled`.
        on_trial: told of each trial when it is done, and of each repetition.

    Attributes:
        trials: what was tried, in order.
        is_complete: whether everything that was meant to be tried has been.
    """

    def __init__(
        self,
        space: Space,
        goal: Goal,
        measure: Callable[[Candidate], Sample],
        clock: TrialBudget,
        on_trial: Callable[[Trial], None] = lambda _: None,
    ) -> None:
        self._space, self._goal, self._measure = space, goal, measure
        self._clock, self._on_trial = clock, on_trial
        self._candidates: list[Candidate] = []
        self._known: dict[Hashable, int] = {}
        self._n_reserved = 0
        self.trials: list[Trial] = []
        self.is_complete = False

    def run(self) -> None:
        """Search until nothing is left to try, time is up or somebody cancels it."""
        families = self._space.families()
        self._n_reserved = n_final(len(families))
        with suppress(Cancelled):
            in_time = self._tries(lambda: self._explore(families))
            self._n_reserved = 0
            self.is_complete = self._tries(self._repeat_best) and in_time

    def _tries(self, work: Callable[[], None]) -> bool:
        """Whether there was time for all of it."""
        try:
            work()
        except _EnoughError:
            return False
        return True

    # what is tried

    def _explore(self, families: Sequence[Family]) -> None:
        tried = [family for family in families if self._survey(family)]
        tried.sort(key=lambda family: self._cost_of(family, family.start))
        refined = [family for family in tried if family.n_ranks > 1][:MOST_REFINED]
        for number, family in enumerate(refined):
            worth = NEAR if number else HOPELESS  # the best one may have been predicted badly
            if self._cost_of(family, family.start) <= worth * self._least():
                self._refine(family)

    def _survey(self, family: Family) -> bool:
        """Try a family where it should be best, unless that is hopeless."""
        is_new = not any(
            (len(trial.devices) > 1) == (family.n_ranks > 1) and trial.sample
            for trial in self.trials
        )
        expected = self._surprise() * family.predicted_s
        if not is_new and expected > HOPELESS * self._least():
            return False
        return self._cost_of(family, family.start) < inf

    def _surprise(self) -> float:
        """How many times as long as predicted that trial took which was predicted best."""
        found = [
            trial.seconds(self._goal) / self._goal.seconds(p.prefill_ts, p.decode_ts)
            for trial in self.trials
            if (p := trial.predicted) is not None and trial.sample is not None
        ]
        return min(found, default=1.0)

    def _refine(self, family: Family) -> None:
        if family.n_ranks == 2:
            self._along(family, family.start, 0, FIRST_STEP, LEAST_STEP)
            return
        split = self._balance(family, family.start) if family.can_balance else family.start
        for step in COMPASS_STEPS:
            is_better = True
            while is_better:
                before = split
                for number in range(family.n_ranks - 1):
                    split = self._along(family, split, number, step, step)
                gain = self._cost_of(family, before) / self._cost_of(family, split)
                is_better = gain > 1 + self._difference(family, split)

    def _difference(self, family: Family, split: Split) -> float:
        candidate = self._space.candidate(family, split)
        at = None if candidate is None else self._known.get(candidate.key)
        return 0.0 if at is None else difference(self.trials[at], self._goal)

    def _along(self, family: Family, split: Split, number: int, step: float, least: float) -> Split:
        """Move one handle to where it is best."""
        handle = self._space.handle(family, split, number)
        n = len(handle)
        start = handle.nearest(split)
        best = minimise(
            lambda index: self._cost_of(family, split if index == start else handle.split(index)),
            n, start, max(1, round(step * n)), max(1, round(least * n)),
        )  # fmt: skip
        return split if best == start else handle.split(best)

    def _balance(self, family: Family, split: Split) -> Split:
        """Give ranks that are busy for long less, as long as that helps."""
        for _ in range(MOST_BALANCED):
            better = self._balanced(family, split)
            if better is None or not self._cost_of(family, better) < self._cost_of(family, split):
                break
            split = better
        return split

    def _balanced(self, family: Family, split: Split) -> Split | None:
        candidate = self._space.candidate(family, split)
        at = None if candidate is None else self._known.get(candidate.key)
        sample = None if at is None else self.trials[at].sample
        return None if sample is None else balanced(split, sample.busy_s)

    def _repeat_best(self) -> None:
        """Measure the best few again, in turn and back; only that decides between them."""
        finalists = self._finalists()
        if len(finalists) < 2:
            return
        for number in range(N_ROUNDS):
            if not self._clock.has_time_for(len(finalists)):
                raise _EnoughError
            for at in finalists if number % 2 else reversed(finalists):
                self._repeat(at)

    def _finalists(self) -> list[int]:
        """The best few; one device and several are both among them where both ran."""
        ran = [at for at, trial in enumerate(self.trials) if trial.sample is not None]
        ran.sort(key=lambda at: self.trials[at].seconds(self._goal))
        best, others = ran[:N_FINAL], ran[N_FINAL:]
        kinds = {len(self.trials[at].devices) > 1 for at in best}
        other = [at for at in others if (len(self.trials[at].devices) > 1) not in kinds]
        return [*best[:-1], other[0]] if other else best

    # trying

    def _least(self) -> float:
        """Seconds of the best so far."""
        return min((trial.seconds(self._goal) for trial in self.trials), default=inf)

    def _cost_of(self, family: Family, split: Split) -> float:
        """Seconds of the goal's request; infinite where it does not fit."""
        candidate = self._space.candidate(family, split)
        if candidate is None:
            return inf
        at = self._known.get(candidate.key)
        if at is None:
            at = self._known[candidate.key] = self._try(candidate)
        return self.trials[at].seconds(self._goal)

    def _try(self, candidate: Candidate) -> int:
        n_reserved = self._clock.at_most(self._n_reserved)
        if self.trials and not self._clock.has_time_for(1 + n_reserved):
            raise _EnoughError
        begun = self._clock.spent_s
        trial = Trial(
            candidate.params, candidate.shares, None, candidate.predicted, candidate.reason
        )
        try:
            trial = replace(trial, sample=self._measure(candidate))
        except Infeasible as error:
            trial = replace(trial, problem=str(error))
        else:
            self._clock.count(begun)
        self.trials.append(trial)
        self._candidates.append(candidate)
        self._on_trial(trial)
        return len(self.trials) - 1

    def _repeat(self, at: int) -> None:
        begun, trial = self._clock.spent_s, self.trials[at]
        assert trial.sample is not None, "only what ran is repeated"
        try:
            again = self._measure(self._candidates[at])
        except Infeasible:  # it ran before, and that counts
            return
        self._clock.count(begun)
        sample = trial.sample.joined(again) if trial.is_final else again
        trial = self.trials[at] = replace(trial, sample=sample, is_final=True)
        self._on_trial(trial)


def n_final(n_family: int) -> int:
    """Trials at the end, of those that were best."""
    return N_FINAL * N_ROUNDS if n_family > 1 else 0


def expected_trials(families: Sequence[Family]) -> int:
    """How many trials a search takes, about."""
    best = min((family.predicted_s for family in families), default=inf)
    tried = [family for family in families if family.predicted_s <= HOPELESS * best]
    refined = [f for f in tried if f.n_ranks > 1 and f.predicted_s <= NEAR * best]
    steps = sum(5 if f.n_ranks == 2 else 4 * (f.n_ranks - 1) for f in refined[:MOST_REFINED])
    kinds = {family.n_ranks > 1 for family in families} - {family.n_ranks > 1 for family in tried}
    return len(tried) + len(kinds) + steps + n_final(len(families))


def balanced(split: Split, busy_s: Sequence[float]) -> Split | None:
    """The split with which all ranks would be busy for the same time if that went with shares.

    Args:
        busy_s: seconds that each rank is busy now; None comes of it where one is not known.
    """
    if len(busy_s) != len(split) or min(busy_s) <= 0 or min(split) <= 0:
        return None
    speeds = [share / busy for share, busy in zip(split, busy_s, strict=True)]
    return tuple(speed / sum(speeds) for speed in speeds)
