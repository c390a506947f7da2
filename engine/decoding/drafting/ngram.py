"""Drafts from the text itself: what has followed the last tokens where they stood before."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

Answer = TypeVar("Answer", bound=Hashable)
"""Answer that runs, as who asks for drafts tells it from others."""


class Kind(NamedTuple):
    """Class of drafts, whose share of right ones is measured apart.

    Attributes:
        source: name of what makes them.
        sureness: number of the class among those of its source, which tells likelier ones apart.
        first_share: assumed share of right drafts until some have been checked.
    """

    source: str
    sureness: int = 0
    first_share: float = 0.5


class DraftTokens(NamedTuple):
    """Tokens that may follow one text.

    Attributes:
        tokens: ids of the next tokens, one at least.
        kind: class of these drafts.
    """

    tokens: Sequence[int]
    kind: Kind


class DraftSource(Protocol[Answer]):
    """Maker of drafts for all running answers of one model at once.

    Attributes:
        kind: class of all its drafts, where making them takes time, so that they are made only if
            they are going to be checked; None where they take next to none.
        most: largest number of drafts that it makes for a text; 0 for any number.
    """

    @property
    def kind(self) -> Kind | None: ...

    @property
    def most(self) -> int: ...

    def draft(
        self, texts: Mapping[Answer, Sequence[int]], most: int
    ) -> Mapping[Answer, DraftTokens]:
        """Return up to `most` tokens that may follow each text; answers without a draft are absent.

        Args:
            texts: all tokens of some answers so far, prompts included; mostly those of the last
                call with some more, or with the last ones replaced.
        """
        ...

    def n_unread(self, texts: Mapping[Answer, Sequence[int]]) -> int:
        """Return about how many tokens it has to read before it can draft what follows texts."""
        ...

    def forget(self, answer: Answer) -> None:
        """Free what is kept for an answer that is over; it may be unknown."""
        ...


ROOT = 0
NONE = -1
"""State of the empty sequence, and what stands for none."""


class Repeats:
    """A sequence of tokens, and where its end stands for the second time.

    Attributes:
        n: number of tokens.
        n_alike: length in tokens of the longest end that stands in the sequence earlier as well.
        behind: position behind such an earlier place, the latest that is known.
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
        alike = self._link[state]
        self.n_alike, self.behind = self._length[alike], self._behind[alike]
        self._behind[alike] = self.n

    def _after(self, before: int, token: int) -> int:
        """Return the state of exactly the sequence of a state with one more token."""
        found, length = self._next[before][token], self._length[before] + 1
        if self._length[found] == length:
            return found
        made = self._new(length, dict(self._next[found]), self._behind[found])
        self._link[made] = self._link[found]
        self._link[found] = made
        while before != NONE and self._next[before].get(token) == found:
            self._next[before][token] = made
            before = self._link[before]
        return made

    def _new(self, length: int, following: dict[int, int], behind: int) -> int:
        """Add a state, whose link is still to be set, and return its number."""
        self._next.append(following)
        self._link.append(ROOT)
        self._length.append(length)
        self._behind.append(behind)
        return len(self._length) - 1


ALIKE = (2, 3, 5, 9)
"""Numbers of last tokens that stood in the text before, from each of which on drafts are a kind of
their own: the more tokens are alike, the more drafts are right."""

MIN_ALIKE = ALIKE[0]
"""Smallest number of last tokens that have to stand in the text before."""

KINDS = tuple(Kind("ngram", n, share) for n, share in enumerate((0.3, 0.45, 0.6, 0.8)))
"""Kind of drafts for each number of `ALIKE`."""

MAX_TOKENS = 1 << 16
"""Largest number of tokens that are searched: half as many of the last ones are, once there are
more. A token takes about half a kilobyte of the host's memory."""


class NgramDrafter:
    """Drafts for one answer, from its prompt and from what it has said so far.

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

    def draft(self, ids: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that may follow; none where nothing is alike.

        Args:
            ids: all tokens so far; mostly those of the last call with some more.
        """
        self._read(ids)
        if self.n_alike < MIN_ALIKE:
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
        if len(ids) - self._begin > MAX_TOKENS:
            n = self._begin = len(ids) - MAX_TOKENS // 2
            self._seen = Repeats()
        for token in ids[n:]:
            self._seen.append(token)
        self._last = ids[-1]


class NgramSource(Generic[Answer]):
    """Drafts for all running answers, each from its own text."""

    kind, most = None, 0

    def __init__(self) -> None:
        self._drafters: dict[Answer, NgramDrafter] = {}

    def draft(
        self, texts: Mapping[Answer, Sequence[int]], most: int
    ) -> Mapping[Answer, DraftTokens]:
        """Return what has followed the last tokens of each text, see `DraftSource`."""
        found = dict[Answer, DraftTokens]()
        for answer, ids in texts.items():
            drafter = self._drafters.setdefault(answer, NgramDrafter())
            tokens = drafter.draft(ids, most)
            if tokens:
                found[answer] = DraftTokens(tokens, kind_of(drafter.n_alike))
        return found

    def n_unread(self, texts: Mapping[Answer, Sequence[int]]) -> int:
        """Return 0: reading takes next to no time."""
        return 0

    def forget(self, answer: Answer) -> None:
        """Free what is known of an answer's text."""
        self._drafters.pop(answer, None)


def kind_of(n_alike: int) -> Kind:
    """Return the kind of drafts behind so many tokens that stood in the text before."""
    return KINDS[max(0, sum(n_alike >= least for least in ALIKE) - 1)]
