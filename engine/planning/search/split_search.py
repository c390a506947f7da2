"""The search for the fastest split, by measuring a few; independent of models and devices.

First, each set of devices is tried in each mode with the split predicted to be best, most promising
first; hopeless ones are skipped. Then the best of these are refined: with two devices, by a
golden-section search (Kiefer, Proc. AMS 4, 1953) in a bracket around the prediction; with more, by
balancing the ranks' busy times and moving one handle after the other (compass search: Kolda, Lewis
and Torczon, SIAM Review 45, 2003). Finally, the best few are measured again in turn, because a
machine's load drifts; only these measurements decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from statistics import median

from engine.errors import Cancelled
from engine.planning.search.model_space import (
    Candidate,
    Family,
    ModelSpace,
    Split,
    balanced,
    minimise,
)
from engine.planning.search.results import Goal, Sample, Trial, difference

HOPELESS = 1.5
"""Multiple of the best time so far; a split predicted to take longer is not tried."""

NEAR = 1.3
"""Multiple of the best time; a split that takes longer is not refined."""

MAX_REFINED = 3
FIRST_STEP, MIN_STEP = 0.1, 0.02
"""First and last step of a handle between two devices, as fractions of its range."""

COMPASS_STEPS = (0.08, 0.03)
"""Steps of a handle between three or more devices, as fractions of its range; few, to save time."""

N_FINAL, N_ROUNDS = 3, 2
"""Number of splits that are measured again at the end, and number of repetitions."""

MAX_BALANCED = 2


class Infeasible(Exception):
    """Error for a split that cannot run on this machine; the search skips it."""


class TrialBudget:
    """The time budget of a search; `trial_s` is assumed per trial until some are measured."""

    def __init__(
        self, budget_s: float, trial_s: float, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._now, self._begun = now, now()
        self._budget_s, self._expected_s = budget_s, trial_s
        self._took: list[float] = []

    @property
    def spent_s(self) -> float:
        """Seconds since the search started."""
        return self._now() - self._begun

    @property
    def trial_s(self) -> float:
        """Typical seconds per trial, not counting the first, which also loads the model."""
        return median(self._took[1:]) if len(self._took) > 1 else self._expected_s

    def has_time_for(self, n_trials: int) -> bool:
        """Return whether `n_trials` more trials fit into the budget."""
        return self.spent_s + n_trials * self.trial_s <= self._budget_s

    def at_most(self, n_trials: int) -> int:
        """Return `n_trials`, but at most a third of the trials that the whole budget allows."""
        return min(n_trials, int(self._budget_s / self.trial_s / 3))

    def count(self, begun_s: float) -> None:
        """Record a trial that started at `begun_s` and has just finished."""
        self._took.append(self.spent_s - begun_s)


class _EnoughError(Exception):
    """Error raised when no time is left for another trial."""


class SplitSearch:
    """A search for the fastest split in a space.

    Args:
        measure: measures a split; raises `Infeasible` or `Cancelled`.
        on_trial: receives each trial when it is finished, and again when it is repeated.

    Attributes:
        is_complete: False if time ran out or the search was cancelled.
    """

    def __init__(
        self, space: ModelSpace, goal: Goal, measure: Callable[[Candidate], Sample],
        budget: TrialBudget, on_trial: Callable[[Trial], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._space, self._goal, self._measure = space, goal, measure
        self._budget, self._on_trial = budget, on_trial
        self._candidates: list[Candidate] = []
        self._known: dict[Hashable, int] = {}
        self._n_reserved = 0
        self.trials: list[Trial] = []
        self.is_complete = False

    def run(self) -> None:
        """Search until everything has been tried, time is up or the search is cancelled."""
        families = self._space.families()
        self._n_reserved = n_final(len(families))
        with suppress(Cancelled):
            in_time = self._ends_in_time(lambda: self._explore(families))
            self._n_reserved = 0
            self.is_complete = self._ends_in_time(self._repeat_best) and in_time

    def _ends_in_time(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except _EnoughError:
            return False
        return True

    # strategy

    def _explore(self, families: Sequence[Family]) -> None:
        tried = [family for family in families if self._survey(family)]
        tried.sort(key=lambda family: self._cost_of(family, family.start))
        refined = [family for family in tried if family.n_ranks > 1][:MAX_REFINED]
        for number, family in enumerate(refined):
            worth = NEAR if number else HOPELESS  # the prediction for the best one may be off
            if self._cost_of(family, family.start) <= worth * self._least():
                self._refine(family)

    def _survey(self, family: Family) -> bool:
        """Try a family at its start unless it is hopeless; return whether it ran there."""
        is_new = not any(
            (len(trial.devices) > 1) == (family.n_ranks > 1) and trial.sample
            for trial in self.trials
        )
        expected = self._surprise() * family.predicted_s
        if not is_new and expected > HOPELESS * self._least():
            return False
        return self._cost_of(family, family.start) < inf

    def _surprise(self) -> float:
        """Return the smallest ratio of measured to predicted time in any trial; 1 if none ran."""
        found = [
            trial.seconds(self._goal) / self._goal.seconds(p.prefill_ts, p.decode_ts)
            for trial in self.trials
            if (p := trial.predicted) is not None and trial.sample is not None
        ]
        return min(found, default=1.0)

    def _refine(self, family: Family) -> None:
        if family.n_ranks == 2:
            self._along(family, family.start, 0, FIRST_STEP, MIN_STEP)
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
        # 0 for a split not tried yet
        candidate = self._space.candidate(family, split)
        at = None if candidate is None else self._known.get(candidate.key)
        return 0.0 if at is None else difference(self.trials[at], self._goal)

    def _along(self, family: Family, split: Split, number: int, step: float, least: float) -> Split:
        handle = self._space.handle(family, split, number)
        n = len(handle)
        start = handle.nearest(split)
        best = minimise(
            lambda index: self._cost_of(family, split if index == start else handle.split(index)),
            n, start, max(1, round(step * n)), max(1, round(least * n)),
        )  # fmt: skip
        return split if best == start else handle.split(best)

    def _balance(self, family: Family, split: Split) -> Split:
        for _ in range(MAX_BALANCED):
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
        # in turn, back and forth; only these measurements decide among them
        finalists = self._finalists()
        if len(finalists) < 2:
            return
        for number in range(N_ROUNDS):
            if not self._budget.has_time_for(len(finalists)):
                raise _EnoughError
            for at in finalists if number % 2 else reversed(finalists):
                self._repeat(at)

    def _finalists(self) -> list[int]:
        """Return the indices of the best few trials, on one and on several devices if both ran."""
        ran = [at for at, trial in enumerate(self.trials) if trial.sample is not None]
        ran.sort(key=lambda at: self.trials[at].seconds(self._goal))
        best, others = ran[:N_FINAL], ran[N_FINAL:]
        kinds = {len(self.trials[at].devices) > 1 for at in best}
        other = [at for at in others if (len(self.trials[at].devices) > 1) not in kinds]
        return [*best[:-1], other[0]] if other else best

    # trials

    def _least(self) -> float:
        return min((trial.seconds(self._goal) for trial in self.trials), default=inf)

    def _cost_of(self, family: Family, split: Split) -> float:
        # each candidate is measured once
        candidate = self._space.candidate(family, split)
        if candidate is None:
            return inf
        at = self._known.get(candidate.key)
        if at is None:
            at = self._known[candidate.key] = self._try(candidate)
        return self.trials[at].seconds(self._goal)

    def _try(self, candidate: Candidate) -> int:
        n_reserved = self._budget.at_most(self._n_reserved)
        if self.trials and not self._budget.has_time_for(1 + n_reserved):
            raise _EnoughError
        begun = self._budget.spent_s
        trial = Trial(
            candidate.params, candidate.shares, None, candidate.predicted, candidate.reason
        )
        try:
            trial = replace(trial, sample=self._measure(candidate))
        except Infeasible as error:
            trial = replace(trial, problem=str(error))
        else:
            self._budget.count(begun)
        self.trials.append(trial)
        self._candidates.append(candidate)
        self._on_trial(trial)
        return len(self.trials) - 1

    def _repeat(self, at: int) -> None:
        begun, trial = self._budget.spent_s, self.trials[at]
        assert trial.sample is not None, "only what ran is repeated"
        try:
            again = self._measure(self._candidates[at])
        except Infeasible:  # it ran before, and only that counts
            return
        self._budget.count(begun)
        sample = trial.sample.joined(again) if trial.is_final else again
        trial = self.trials[at] = replace(trial, sample=sample, is_final=True)
        self._on_trial(trial)


def n_final(n_family: int) -> int:
    """Return the number of trials in the final rounds."""
    return N_FINAL * N_ROUNDS if n_family > 1 else 0


def expected_trials(families: Sequence[Family]) -> int:
    """Estimate the number of trials in a search."""
    best = min((family.predicted_s for family in families), default=inf)
    tried = [family for family in families if family.predicted_s <= HOPELESS * best]
    refined = [f for f in tried if f.n_ranks > 1 and f.predicted_s <= NEAR * best]
    steps = sum(5 if f.n_ranks == 2 else 4 * (f.n_ranks - 1) for f in refined[:MAX_REFINED])
    kinds = {family.n_ranks > 1 for family in families} - {family.n_ranks > 1 for family in tried}
    return len(tried) + len(kinds) + steps + n_final(len(families))
