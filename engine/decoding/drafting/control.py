"""Chooses the number of draft tokens from measured times and acceptance rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.decoding.drafting.ngram import Kind

LENGTHS = (1, 3, 7, 15)
"""Numbers of draft tokens to verify; together with the preceding token, they match the sizes of
recorded passes."""

WEIGHT = 0.1  # weight of a new measurement in a running mean
N_UNSTEADY = 3  # number of initial passes per size that are not timed, as they allocate and record
ROW_COST = 0.04  # assumed time per further row, relative to the first, until measured
MAKING_COST = 0.1  # assumed time per draft token, relative to a normal token, until measured
MIN_GAIN = 1.03  # minimum expected speed-up for drafting
PROBE_EVERY = 64  # minimum number of skipped drafts before a probe, which measures again
PROBE_SHARE = 0.02  # maximum share of time for probes
CHOICE_SHARE = 0.01  # maximum share of time for choices that select no draft

MAX_BETWEEN = 32
"""Maximum number of passes between such choices for fast models, which therefore notice repetitions
later."""

MAX_SAVED = 256
"""Number of passes over which the time for probes can accumulate; more would stall an answer."""

MIN_CHECKS = 3  # number of verified passes after which a kind of draft that loses time is stopped

MAX_CREDIT = 2.0
"""Maximum gain, in tokens, that a kind of draft can accumulate to offset later losses."""

REPAID_AFTER = 256  # number of drafting passes over which the drafter's reading time is amortised


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens that a pass could verify.

    Attributes:
        kinds: kind of draft for each answer.
        most: maximum number of draft tokens that every answer can have.
        maker: name of the drafter that has yet to make some of the tokens; "" if all exist.
        n_made: number of answers for which the drafter has to make them.
        n_unread: number of tokens that the drafter has to read first.
        bound: maximum number of draft tokens that the drafter can make; 0 for no limit.
    """

    kinds: Sequence[Kind]
    most: int
    maker: str = ""
    n_made: int = 0
    n_unread: int = 0
    bound: int = 0

    @property
    def lengths(self) -> Sequence[int]:
        """Numbers of draft tokens that can be verified for each answer, ascending."""
        most = min(self.most, self.bound or self.most)
        lengths = [length for length in LENGTHS if length <= most]
        is_other = 0 < most == self.bound and most not in LENGTHS
        return [*lengths, most] if is_other else lengths


class DraftControl:
    """Measured pass times and acceptance rates, and the choice of drafts that follows from them."""

    def __init__(self) -> None:
        self._shares: dict[Kind, float] = {}
        self._passes = _Times()
        self._makings: dict[str, _Times] = {}
        self._readings: dict[str, float] = {}
        self._trials: dict[Kind, _Trial] = {}
        self._n_skipped: dict[str, int] = {}
        self._saved = 0.0  # seconds left for probes

    def note_pass(self, n_rows: int, seconds: float) -> None:
        """Record the time of a pass without drafting work."""
        self._passes.note(n_rows, seconds)
        most = max(self._saved, MAX_SAVED * PROBE_SHARE * seconds)
        self._saved = min(self._saved + PROBE_SHARE * seconds, most)

    def measured_s(self, n_rows: int) -> float | None:
        """Return the mean time of a pass in seconds; None if this size has not been measured."""
        return self._passes.seconds(n_rows) if self._passes.has(n_rows) else None

    def n_between_choices(self, n_rows: int, seconds: float) -> int:
        """Return the number of passes with `n_rows` rows until the next choice, after a choice
        without a result.

        The `seconds` that a choice takes are not negligible for models that need less than a
        millisecond per token.
        """
        if not self._passes.is_known:
            return 1
        n_passes = seconds / (CHOICE_SHARE * max(self._passes.seconds(n_rows), 1e-6))
        return max(1, min(MAX_BETWEEN, round(n_passes)))

    def note_reading(self, source: str, n_tokens: int, seconds: float) -> None:
        """Record the time a drafter took to read tokens without drafting."""
        before = self._readings.get(source, seconds / n_tokens)
        self._readings[source] = before + WEIGHT * (seconds / n_tokens - before)
        self._saved = max(0.0, self._saved - seconds)

    def note_making(self, source: str, n_answers: int, length: int, seconds: float) -> None:
        """Record the time a drafter took to make `length` draft tokens for each of several
        answers."""
        self._makings.setdefault(source, _Times()).note(n_answers, seconds / length)
        self._n_skipped[source] = 0
        self._saved = max(0.0, self._saved - seconds)

    def note_check(self, kind: Kind, n_drafted: int, n_right: int, n_answers: int = 1) -> None:
        """Record how many draft tokens of a kind were accepted in a pass over `n_answers`
        answers."""
        if not n_drafted:
            return
        for number in range(min(n_right + 1, n_drafted)):
            before = self.share(kind)
            self._shares[kind] = before + WEIGHT * (float(number < n_right) - before)
        alone = self._passes.seconds(n_answers)
        seconds = self._passes.seconds(n_answers * (1 + n_drafted))
        if kind.source in self._makings and self._makings[kind.source].is_known:
            seconds += n_drafted * self._makings[kind.source].seconds(n_answers)
        self._trials.setdefault(kind, _Trial()).note(1 + n_right - seconds / alone)

    def share(self, kind: Kind) -> float:
        """Return the acceptance rate of a kind."""
        return self._shares.get(kind, kind.first_share)

    def choose(self, proposals: Sequence[Proposal]) -> tuple[Proposal, int] | None:
        """Return which draft tokens to verify and how many per answer; None to verify none.

        Unprofitable drafts are skipped and only probed now and then, more rarely if they are slow;
        the same goes for kinds that have lost time in their first passes, whatever their acceptance
        rate. Longer drafts are tried only once shorter ones have been measured.

        Args:
            proposals: drafts to choose from, at most one per drafter.
        """
        chosen, most = None, MIN_GAIN
        for proposal in proposals:
            for length in self._lengths(proposal):
                gain = self._gain(proposal, length)
                if gain >= most and (chosen is None or gain > most):
                    chosen, most = (proposal, length), gain
        for proposal in proposals:
            if proposal.lengths and (chosen is None or proposal is not chosen[0]):
                n = self._n_skipped[proposal.maker] = self._n_skipped.get(proposal.maker, 0) + 1
                if n >= PROBE_EVERY and self._loss(proposal) <= self._saved:
                    if not proposal.maker:  # else only once made, which may be slow
                        self._n_skipped[proposal.maker] = 0
                        self._saved -= max(0.0, self._loss(proposal))
                    return proposal, proposal.lengths[0]
        return chosen

    def _lengths(self, proposal: Proposal) -> Sequence[int]:
        if all(kind in self._trials and self._trials[kind].is_lost for kind in proposal.kinds):
            return ()
        n = len(proposal.kinds)
        known = [length for length in proposal.lengths if self._passes.has(n * (1 + length))]
        return sorted({*known, *[one for one in proposal.lengths if one not in known][:1]})

    def _loss(self, proposal: Proposal) -> float:
        """Return the expected delay of tokens, in seconds, with the shortest draft."""
        n, length = len(proposal.kinds), proposal.lengths[0]
        alone = self._passes.seconds(n)
        gained = self._n_tokens(proposal, length) * alone
        return self._reading(proposal) + self._seconds(proposal, length) - gained

    def _gain(self, proposal: Proposal, length: int) -> float:
        alone = self._passes.seconds(len(proposal.kinds))
        seconds = self._seconds(proposal, length) + self._reading(proposal) / REPAID_AFTER
        return self._n_tokens(proposal, length) * alone / seconds

    def _reading(self, proposal: Proposal) -> float:
        return proposal.n_unread * self._readings.get(proposal.maker, 0.0)

    def _n_tokens(self, proposal: Proposal, length: int) -> float:
        each = [_expected(self.share(kind), length) for kind in proposal.kinds]
        return sum(each) / len(each)

    def _seconds(self, proposal: Proposal, length: int) -> float:
        n = len(proposal.kinds)
        making = 0.0
        if proposal.maker:
            making = length * self._making(proposal, self._passes.seconds(n))
        return making + self._passes.seconds(n * (1 + length))

    def _making(self, proposal: Proposal, alone: float) -> float:
        times = self._makings.get(proposal.maker)
        if times is None or not times.is_known or not self._passes.is_known:
            return MAKING_COST * alone
        return times.seconds(proposal.n_made)


class _Trial:
    """Bounded total of the time gained by one kind of draft, in tokens."""

    def __init__(self) -> None:
        self._gain, self._n = 0.0, 0

    @property
    def is_lost(self) -> bool:
        """Whether the kind lost time and is only probed now and then."""
        return self._n >= MIN_CHECKS and self._gain < 0

    def note(self, gain: float) -> None:
        if self.is_lost and gain > 0:
            self._gain, self._n = 0.0, 0
        gain = max(gain, -1.0)  # long drafts may be costly even if short ones pay off
        self._gain, self._n = min(self._gain + gain, MAX_CREDIT), self._n + 1


class _Times:
    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._n_noted: dict[int, int] = {}

    @property
    def is_known(self) -> bool:
        return bool(self._means)

    def has(self, n_rows: int) -> bool:
        return n_rows in self._means

    def note(self, n_rows: int, seconds: float) -> None:
        self._n_noted[n_rows] = self._n_noted.get(n_rows, 0) + 1
        if self._n_noted[n_rows] > N_UNSTEADY:
            before = self._means.get(n_rows, seconds)
            # bounded, because a pass may have been delayed by something else
            self._means[n_rows] = before + WEIGHT * (min(seconds, 2 * before) - before)

    def seconds(self, n_rows: int) -> float:
        """Return the time of a pass, extrapolated from smaller sizes if it is unknown."""
        if n_rows in self._means:
            return self._means[n_rows]
        if not self._means:
            return 1 + ROW_COST * n_rows
        smaller = sorted(size for size in self._means if size <= n_rows)
        known = smaller[-1] if smaller else min(self._means)
        seconds = self._means[known] * (1 + ROW_COST * n_rows) / (1 + ROW_COST * known)
        if len(smaller) > 1:
            row_s = (self._means[known] - self._means[smaller[-2]]) / (known - smaller[-2])
            seconds = max(seconds, self._means[known] + row_s * (n_rows - known))
        return seconds


def _expected(share: float, length: int) -> float:
    """Return the mean number of tokens per pass: one plus the accepted draft tokens."""
    return (1 - share ** (length + 1)) / (1 - share) if share < 1 else 1.0 + length
