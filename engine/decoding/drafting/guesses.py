"""Interface of what guesses the next tokens of all running answers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

Answer = TypeVar("Answer", bound=Hashable)
"""Answer that runs, as who asks for guesses tells it from others."""


class Kind(NamedTuple):
    """Class of guesses, whose share of right ones is measured apart.

    Attributes:
        source: name of what makes them.
        sureness: number of the class among those of its source, which tells likelier ones apart.
        first_share: assumed share of right guesses until some have been checked.
    """

    source: str
    sureness: int = 0
    first_share: float = 0.5


class Guess(NamedTuple):
    """Tokens that may follow one text.

    Attributes:
        tokens: ids of the next tokens, one at least.
        kind: class of these guesses.
    """

    tokens: Sequence[int]
    kind: Kind


class GuessSource(Protocol[Answer]):
    """Maker of guesses for all running answers of one model at once.

    Attributes:
        kind: class of all its guesses, where making them takes time, so that they are made only if
            they are going to be checked; None where they take next to none.
        most: largest number of guesses that it makes for a text; 0 for any number.
    """

    @property
    def kind(self) -> Kind | None: ...

    @property
    def most(self) -> int: ...

    def guess(self, texts: Mapping[Answer, Sequence[int]], most: int) -> Mapping[Answer, Guess]:
        """Return up to `most` tokens that may follow each text; answers without a guess are absent.

        Args:
            texts: all tokens of some answers so far, prompts included; mostly those of the last
                call with some more, or with the last ones replaced.
        """
        ...

    def n_unread(self, texts: Mapping[Answer, Sequence[int]]) -> int:
        """Return about how many tokens it has to read before it can guess what follows texts."""
        ...

    def forget(self, answer: Answer) -> None:
        """Free what is kept for an answer that is over; it may be unknown."""
        ...
