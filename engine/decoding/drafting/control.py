"""Choice of how many drafts are worth checking, by what this has brought and taken so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.decoding.drafting.ngram import Kind

LENGTHS = (1, 3, 7, 15)
"""Numbers of drafts that are checked at once: with the token before them, rows of a pass that is
recorded."""

WEIGHT = 0.1
"""Weight of a new measurement in a mean."""

N_UNSTEADY = 3
"""Number of passes of one size whose times do not count: what they need is allocated and recorded
then."""

ROW_COST = 0.04
"""Time of a further row as a part of the first row's, until it is measured."""

MAKING_COST = 0.1
"""Time of making a further draft as a part of a token's, until it is measured."""

MIN_GAIN = 1.03
"""Expected gain in tokens per second from which on drafts are checked."""

PROBE_EVERY = 64
"""Least number of times that drafts are left out before one is checked, to measure once more."""

PROBE_SHARE = 0.02
"""Largest part of the time that goes into drafts which are only checked to measure once more."""

CHOICE_SHARE = 0.01
"""Largest part of the time that goes into choices which come to nothing."""

MAX_BETWEEN = 32
"""Largest number of passes from such a choice to the next one, where tokens take little time: what
repeats is noticed later."""

MAX_SAVED = 256
"""Number of passes whose part may be saved up for such drafts: more would make an answer stand
still."""

MIN_CHECKS = 3
"""Number of checked passes from which on a kind of drafts that has lost time is stopped."""

MAX_CREDIT = 2.0
"""Largest gain of a kind of drafts that later losses have to use up, in tokens."""

REPAID_AFTER = 256
"""Number of passes with drafts that have to make up for what their source reads before."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts that a pass could check.

    Attributes:
        kinds: kind of the drafts for each answer.
        most: largest number of drafts that all answers have.
        maker: name of the source that has yet to make some of them; "" if all are there.
        n_made: number of answers for which it has to.
        n_unread: number of tokens that it has to read before.
        bound: largest number of drafts that it can make; 0 for any number.
    """

    kinds: Sequence[Kind]
    most: int
    maker: str = ""
    n_made: int = 0
    n_unread: int = 0
    bound: int = 0

    @property
    def lengths(self) -> Sequence[int]:
        """Numbers of drafts that can be checked at once for each answer, in ascending order."""
        most = min(self.most, self.bound or self.most)
        found = [length for length in LENGTHS if length <= most]
        is_other = 0 < most == self.bound and most not in LENGTHS
        return [*found, most] if is_other else found


class DraftControl:
    """Measured times of passes and shares of right drafts, and what follows from them."""

    def __init__(self) -> None:
        self._shares: dict[Kind, float] = {}
        self._passes = _Times()
        self._makings: dict[str, _Times] = {}
        self._readings: dict[str, float] = {}
        self._trials: dict[Kind, _Trial] = {}
        self._n_skipped: dict[str, int] = {}
        self._saved = 0.0  # seconds that probes may take

    def note_pass(self, n_rows: int, seconds: float) -> None:
        """Note how long a pass took that computed nothing but rows of this kind."""
        self._passes.note(n_rows, seconds)
        most = max(self._saved, MAX_SAVED * PROBE_SHARE * seconds)
        self._saved = min(self._saved + PROBE_SHARE * seconds, most)

    def measured_s(self, n_rows: int) -> float | None:
        """Return the mean time of a pass in seconds; None until one of this size was measured."""
        return self._passes.seconds(n_rows) if self._passes.has(n_rows) else None

    def n_between_choices(self, n_rows: int, seconds: float) -> int:
        """Return after how many passes to choose again, behind a choice that came to nothing.

        With a model whose tokens take less than a millisecond, a choice takes a part of it.

        Args:
            n_rows: number of rows of these passes.
            seconds: time that a choice takes.
        """
        if not self._passes.is_known:
            return 1
        wanted = seconds / (CHOICE_SHARE * max(self._passes.seconds(n_rows), 1e-6))
        return max(1, min(MAX_BETWEEN, round(wanted)))

    def note_reading(self, source: str, n_tokens: int, seconds: float) -> None:
        """Note how long a source took to read tokens without making drafts."""
        before = self._readings.get(source, seconds / n_tokens)
        self._readings[source] = before + WEIGHT * (seconds / n_tokens - before)
        self._saved = max(0.0, self._saved - seconds)

    def note_making(self, source: str, n_answers: int, length: int, seconds: float) -> None:
        """Note how long a source took to make `length` drafts for each of some answers."""
        self._makings.setdefault(source, _Times()).note(n_answers, seconds / length)
        self._n_skipped[source] = 0
        self._saved = max(0.0, self._saved - seconds)

    def note_check(self, kind: Kind, n_drafted: int, n_right: int, n_answers: int = 1) -> None:
        """Note how many of the drafts of a kind were right, the first ones.

        Args:
            n_answers: number of answers of which the pass checked drafts.
        """
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
        """Return the share of right drafts of a kind."""
        return self._shares.get(kind, kind.first_share)

    def choose(self, proposals: Sequence[Proposal]) -> tuple[Proposal, int] | None:
        """Return which drafts to check and how many for each answer; None for none.

        What does not pay is left out, and tried now and then: the rarer, the more time it takes. So
        is what has lost time in its first passes, however likely it seems. More drafts are checked
        only once it was measured how long fewer take.

        Args:
            proposals: what could be checked, one of each maker at most.
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
                    if not proposal.maker:  # else once they are made, which may take a while
                        self._n_skipped[proposal.maker] = 0
                        self._saved -= max(0.0, self._loss(proposal))
                    return proposal, proposal.lengths[0]
        return chosen

    def _lengths(self, proposal: Proposal) -> Sequence[int]:
        """Return the numbers of drafts to choose from; none where all kinds are stopped."""
        if all(kind in self._trials and self._trials[kind].is_lost for kind in proposal.kinds):
            return ()
        n = len(proposal.kinds)
        known = [length for length in proposal.lengths if self._passes.has(n * (1 + length))]
        return sorted({*known, *[one for one in proposal.lengths if one not in known][:1]})

    def _loss(self, proposal: Proposal) -> float:
        """Return the seconds by which tokens are expected to come later with few drafts."""
        n, length = len(proposal.kinds), proposal.lengths[0]
        alone = self._passes.seconds(n)
        gained = self._n_tokens(proposal, length) * alone
        return self._reading(proposal) + self._seconds(proposal, length) - gained

    def _gain(self, proposal: Proposal, length: int) -> float:
        """Return the tokens per second with drafts as a multiple of those without."""
        alone = self._passes.seconds(len(proposal.kinds))
        seconds = self._seconds(proposal, length) + self._reading(proposal) / REPAID_AFTER
        return self._n_tokens(proposal, length) * alone / seconds

    def _reading(self, proposal: Proposal) -> float:
        """Return the time that a source takes to read what it has not read, as far as known."""
        return proposal.n_unread * self._readings.get(proposal.maker, 0.0)

    def _n_tokens(self, proposal: Proposal, length: int) -> float:
        """Return the mean number of tokens that a pass gives each answer."""
        each = [_expected(self.share(kind), length) for kind in proposal.kinds]
        return sum(each) / len(each)

    def _seconds(self, proposal: Proposal, length: int) -> float:
        """Return the time of making drafts and of the pass that checks them."""
        n = len(proposal.kinds)
        making = 0.0
        if proposal.maker:
            making = length * self._making(proposal, self._passes.seconds(n))
        return making + self._passes.seconds(n * (1 + length))

    def _making(self, proposal: Proposal, alone: float) -> float:
        """Return the time of making one draft for each answer that needs it.

        Args:
            alone: time of a pass without drafts.
        """
        times = self._makings.get(proposal.maker)
        if times is None or not times.is_known or not self._passes.is_known:
            return MAKING_COST * alone
        return times.seconds(proposal.n_made)


class _Trial:
    """The time that drafts of one kind have gained, in tokens, as far as it still counts."""

    def __init__(self) -> None:
        self._gain, self._n = 0.0, 0

    @property
    def is_lost(self) -> bool:
        """Whether they have lost time, so that they are only tried now and then."""
        return self._n >= MIN_CHECKS and self._gain < 0

    def note(self, gain: float) -> None:
        if self.is_lost and gain > 0:
            self._gain, self._n = 0.0, 0
        gain = max(gain, -1.0)  # more drafts may cost much where a few still pay
        self._gain, self._n = min(self._gain + gain, MAX_CREDIT), self._n + 1


class _Times:
    """Mean times of passes by their numbers of rows."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._n_noted: dict[int, int] = {}

    @property
    def is_known(self) -> bool:
        """Whether any time has been measured."""
        return bool(self._means)

    def has(self, n_rows: int) -> bool:
        """Return whether a pass of this size has been measured."""
        return n_rows in self._means

    def note(self, n_rows: int, seconds: float) -> None:
        self._n_noted[n_rows] = self._n_noted.get(n_rows, 0) + 1
        if self._n_noted[n_rows] > N_UNSTEADY:
            before = self._means.get(n_rows, seconds)
            # one that was held up by something else says little
            self._means[n_rows] = before + WEIGHT * (min(seconds, 2 * before) - before)

    def seconds(self, n_rows: int) -> float:
        """Return the time of a pass; from those of smaller sizes where it is not known."""
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
    """Return the mean number of tokens that a pass gives: one, and the drafts that are right."""
    return (1 - share ** (length + 1)) / (1 - share) if share < 1 else 1.0 + length
