"""Strings that an answer must not contain: found in its text as it grows, whatever its tokens.

Text that may still become a banned string is held back. Once it is one, the answer goes back to the
token in which the string begins, which must not come there again, and goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.generation.results import TokenLogprob


@dataclass(frozen=True, slots=True)
class Said:
    """A token of an answer.

    Attributes:
        token: its id.
        text: characters that it completes.
        begun: bytes of a character that earlier tokens had begun before it.
        logprobs: how likely it was, if that is wanted.
    """

    token: int
    text: str
    begun: bytes = b""
    logprobs: tuple[TokenLogprob, ...] = ()


class BannedStrings:
    """Search for banned strings in streamed text; holds the tokens that may be part of one.

    Large and small letters are the same to it. Of several strings that one token completes, the one
    that begins last counts, so that as little as possible is taken back.

    Args:
        banned: strings to search for.
        said: text of the answer so far, which cannot be taken back any more.

    Attributes:
        held: tokens that may be part of a banned string, oldest first.
    """

    def __init__(self, banned: Sequence[str], said: str = "") -> None:
        self._banned = [_folded(text) for text in banned]
        self._n_tail = max((len(text) for text in self._banned), default=1) - 1
        self.held: list[Said] = []
        self._tail = ""  # end of what was released, in which a string may have begun
        self._keep_tail(said)

    @property
    def held_text(self) -> str:
        """Text of the tokens that are held back."""
        return "".join(said.text for said in self.held)

    def feed(self, said: Said) -> int:
        """Add a token; return how many of the last tokens to take back, 0 for none."""
        n_before = len(self._tail) + len(self.held_text)
        self.held.append(said)
        if not self._banned:
            return 0
        text = self._tail + _folded(self.held_text)
        begins = [text.rfind(ban, max(0, n_before - len(ban) + 1)) for ban in self._banned]
        begin = max(begins, default=-1)
        return 0 if begin < 0 else len(self.held) - self._token_at(begin)

    def take_back(self, n: int) -> Said:
        """Forget the last n tokens; return the first of them."""
        first = self.held[-n]
        del self.held[-n:]
        return first

    def n_settled(self, *, is_half: bool) -> int:
        """Return how many of the tokens cannot be part of a banned string any more.

        Args:
            is_half: whether the last token ends in the middle of a character.
        """
        text = self._tail + _folded(self.held_text)
        begin = len(text) - self._possible_start(text)
        is_over = not self._banned or (begin == len(text) and not is_half)
        return len(self.held) if is_over else self._token_at(begin)

    def release(self, n: int) -> list[Said]:
        """Forget the first n tokens and return them; they cannot be taken back after that."""
        released, self.held = self.held[:n], self.held[n:]
        self._keep_tail(self._tail + "".join(said.text for said in released))
        return released

    def _keep_tail(self, text: str) -> None:
        self._tail = _folded(text[max(0, len(text) - self._n_tail) :])

    def _possible_start(self, text: str) -> int:
        """Return the length of the longest end of a text with which a banned string begins."""
        for size in range(min(self._n_tail, len(text)), 0, -1):
            tail = text[-size:]
            if any(len(ban) > size and ban.startswith(tail) for ban in self._banned):
                return size
        return 0

    def _token_at(self, place: int) -> int:
        """Return the index of the held token in which a character begins.

        Args:
            place: index of the character in the tail and the held text; for one in the tail, which
                cannot be taken back, the first held token.
        """
        found, start = 0, len(self._tail)
        for index, said in enumerate(self.held):
            if start > place or (start == place and said.begun):
                break
            found = index
            start += len(said.text)
        return found


def _folded(text: str) -> str:
    """Return a text without the difference of large and small letters, character by character."""
    return text.lower() if text.isascii() else "".join(map(_folded_character, text))


def _folded_character(char: str) -> str:
    """Return a character in its small form, as long as that is a single one."""
    for fold in (str.lower, str.casefold):
        if len(folded := fold(char)) == 1:
            char = folded
    return char
