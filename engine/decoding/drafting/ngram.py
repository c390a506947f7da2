"""Guesses from the text itself: what has followed the last tokens where they stood before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic

from engine.decoding.drafting.guesses import Answer, Guess, Kind
from engine.decoding.drafting.repeats import Repeats

ALIKE = (2, 3, 5, 9)
"""Numbers of last tokens that stood in the text before, from each of which on guesses are a kind of
their own: the more tokens are alike, the more guesses are right."""

LEAST_ALIKE = ALIKE[0]
"""Smallest number of last tokens that have to stand in the text before."""

KINDS = tuple(Kind("ngram", n, share) for n, share in enumerate((0.3, 0.45, 0.6, 0.8)))
"""Kind of guesses for each number of `ALIKE`."""

MOST_TOKENS = 1 << 16
"""Largest number of tokens that are searched: half as many of the last ones are, once there are
more. A token takes about half a kilobyte of the host's memory."""


class NgramDrafter:
    """Guesses for one answer, from its prompt and from what it has said so far.

    Attributes:
        n_alike: number of last tokens that stand in the text before.
    """

    def __init__(self) -> None:
        self._begin = 0
        self._seen = Repeats()
        self._last = -1

    @property
    def n_alike(self) -> int:
        return self._seen.n_alike

    def guess(self, ids: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that may follow; none where nothing is alike.

        Args:
            ids: all tokens so far; mostly those of the last call with some more.
        """
        self._read(ids)
        if self.n_alike < LEAST_ALIKE:
            return []
        behind = self._begin + self._seen.behind
        found = list(ids[behind : behind + most])
        while found and len(found) < most:  # the text repeats itself, so it may go on doing so
            found.append(found[len(found) - (len(ids) - behind)])
        return found

    def _read(self, ids: Sequence[int]) -> None:
        """Take in the tokens that are new; all of them if others have changed."""
        n = self._begin + self._seen.n
        if n > len(ids) or (n and ids[n - 1] != self._last):
            self._begin, self._seen, n = 0, Repeats(), 0
        if len(ids) - self._begin > MOST_TOKENS:
            n = self._begin = len(ids) - MOST_TOKENS // 2
            self._seen = Repeats()
        for token in ids[n:]:
            self._seen.append(token)
        self._last = ids[-1]


class NgramSource(Generic[Answer]):
    """Guesses for all running answers, each from its own text."""

    kind, most = None, 0

    def __init__(self) -> None:
        self._drafters: dict[Answer, NgramDrafter] = {}

    def guess(self, texts: Mapping[Answer, Sequence[int]], most: int) -> Mapping[Answer, Guess]:
        """Return what has followed the last tokens of each text, see `GuessSource`."""
        found = dict[Answer, Guess]()
        for answer, ids in texts.items():
            drafter = self._drafters.setdefault(answer, NgramDrafter())
            tokens = drafter.guess(ids, most)
            if tokens:
                found[answer] = Guess(tokens, kind_of(drafter.n_alike))
        return found

    def n_unread(self, texts: Mapping[Answer, Sequence[int]]) -> int:
        """Return 0: reading takes next to no time."""
        return 0

    def forget(self, answer: Answer) -> None:
        """Free what is known of an answer's text."""
        self._drafters.pop(answer, None)


def kind_of(n_alike: int) -> Kind:
    """Return the kind of guesses behind so many tokens that stood in the text before."""
    return KINDS[max(0, sum(n_alike >= least for least in ALIKE) - 1)]
