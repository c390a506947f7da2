"""N-gram drafting from the text itself: proposes what followed an earlier occurrence of the latest
tokens."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

Answer = TypeVar("Answer", bound=Hashable)  # key of a running answer


class Kind(NamedTuple):
    """Class of draft tokens with its own acceptance rate.

    Attributes:
        source: name of the drafter.
        sureness: index of the class within its drafter; higher ones are accepted more often.
        first_share: assumed acceptance rate until some have been verified.
    """

    source: str
    sureness: int = 0
    first_share: float = 0.5


class DraftTokens(NamedTuple):
    """Draft tokens for one text: at least one id, and their kind."""

    tokens: Sequence[int]
    kind: Kind


class DraftSource(Protocol[Answer]):
    """Drafter for all running answers of one model.

    Attributes:
        kind: class of all its draft tokens if making them takes time, so that they are made only if
            they will be verified; None if the time is negligible.
        most: maximum number of draft tokens per text; 0 for no limit.
    """

    @property
    def kind(self) -> Kind | None: ...

    @property
    def most(self) -> int: ...

    def draft(
        self, texts: Mapping[Answer, Sequence[int]], most: int
    ) -> Mapping[Answer, DraftTokens]:
        """Return up to `most` draft tokens for each text; answers with none are absent.

        Args:
            texts: all tokens so far for some answers, including prompts; usually the last call's
                texts, extended or with their last tokens replaced.
        """

    def n_unread(self, texts: Mapping[Answer, Sequence[int]]) -> int:
        """Return the approximate number of tokens to read before drafting for these texts."""

    def forget(self, answer: Answer) -> None:
        """Free the memory of a finished answer, which may be unknown."""


ROOT = 0  # state of the empty sequence
NONE = -1


class Repeats:
    """A sequence of tokens, and the earlier occurrence of its longest repeated suffix.

    It is a suffix automaton (Blumer et al. 1985).

    Attributes:
        n: number of tokens.
        n_alike: length in tokens of the longest suffix that also occurs earlier.
        behind: position after this suffix's latest known earlier occurrence.
    """

    def __init__(self) -> None:
        self.n = self.n_alike = self.behind = 0
        self._next: list[dict[int, int]] = [{}]
        self._link = [NONE]
        self._length = [0]
        self._behind = [0]
        self._last = ROOT

    def append(self, token: int) -> None:
        """Add a token at the end."""
        self.n += 1
        state = self._new(self._length[self._last] + 1, {}, self.n)
        before = self._last
        while before != NONE and token not in self._next[before]:
            self._next[before][token] = state
            before = self._link[before]
        self._link[state] = ROOT if before == NONE else self._after(before, token)
        self._last = state
        suffix = self._link[state]
        self.n_alike, self.behind = self._length[suffix], self._behind[suffix]
        self._behind[suffix] = self.n

    def _after(self, before: int, token: int) -> int:
        state, length = self._next[before][token], self._length[before] + 1
        if self._length[state] == length:
            return state
        clone = self._new(length, dict(self._next[state]), self._behind[state])
        self._link[clone] = self._link[state]
        self._link[state] = clone
        while before != NONE and self._next[before].get(token) == state:
            self._next[before][token] = clone
            before = self._link[before]
        return clone

    def _new(self, length: int, following: dict[int, int], behind: int) -> int:
        self._next.append(following)
        self._link.append(ROOT)
        self._length.append(length)
        self._behind.append(behind)
        return len(self._length) - 1


ALIKE = (2, 3, 5, 9)
"""Lengths of the repeated suffix at which a new kind of draft begins, because longer matches are
accepted more often."""

MIN_ALIKE = ALIKE[0]  # minimum length of the repeated suffix

KINDS = tuple(Kind("ngram", n, share) for n, share in enumerate((0.3, 0.45, 0.6, 0.8)))
"""Kind of draft for each length in `ALIKE`."""

MAX_TOKENS = 1 << 16
"""Maximum number of tokens to search; beyond it, only the last half is kept. A token takes about
half a kilobyte of host memory."""


class NgramDrafter:
    """Drafter for one answer, from its prompt and its text so far."""

    def __init__(self) -> None:
        self._begin = 0
        self._seen = Repeats()
        self._last = -1

    @property
    def n_alike(self) -> int:
        return self._seen.n_alike

    def draft(self, ids: Sequence[int], most: int) -> list[int]:
        """Return up to `most` draft tokens after `ids`, which usually extend the previous ids."""
        self._read(ids)
        if self.n_alike < MIN_ALIKE:
            return []
        behind = self._begin + self._seen.behind
        tokens = list(ids[behind : behind + most])
        while tokens and len(tokens) < most:  # the text repeats itself and may continue to do so
            tokens.append(tokens[len(tokens) - (len(ids) - behind)])
        return tokens

    def _read(self, ids: Sequence[int]) -> None:
        """Add new tokens; start over if earlier ones have changed."""
        n = self._begin + self._seen.n
        if n > len(ids) or (n and ids[n - 1] != self._last):
            self._begin, self._seen, n = 0, Repeats(), 0
        if len(ids) - self._begin > MAX_TOKENS:
            n = self._begin = len(ids) - MAX_TOKENS // 2
            self._seen = Repeats()
        for token in ids[n:]:
            self._seen.append(token)
        self._last = ids[-1]


class NgramSource(Generic[Answer]):
    """Drafter for all running answers, each from its own text."""

    kind, most = None, 0

    def __init__(self) -> None:
        self._drafters: dict[Answer, NgramDrafter] = {}

    def draft(
        self, texts: Mapping[Answer, Sequence[int]], most: int
    ) -> Mapping[Answer, DraftTokens]:
        """Return a continuation of each text's last tokens; see `DraftSource`."""
        drafts = dict[Answer, DraftTokens]()
        for answer, ids in texts.items():
            drafter = self._drafters.setdefault(answer, NgramDrafter())
            if tokens := drafter.draft(ids, most):
                drafts[answer] = DraftTokens(tokens, kind_of(drafter.n_alike))
        return drafts

    def n_unread(self, texts: Mapping[Answer, Sequence[int]]) -> int:
        """Return 0, because reading takes negligible time."""
        return 0

    def forget(self, answer: Answer) -> None:
        """Free the memory of an answer."""
        self._drafters.pop(answer, None)


def kind_of(n_alike: int) -> Kind:
    """Return the kind of draft after a repeated suffix of this length."""
    return KINDS[max(0, sum(n_alike >= least for least in ALIKE) - 1)]
