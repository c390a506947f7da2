"""What has come before: the longest end of a growing sequence that stands in it twice.

A suffix automaton (Blumer et al., "The smallest automaton recognizing the subwords of a text",
Theoretical Computer Science 40, 1985). A token takes constant time on average.
"""

from __future__ import annotations

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
