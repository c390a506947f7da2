"""Finds special tokens in text."""

from __future__ import annotations

from dataclasses import dataclass

from engine.text.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary

SPACES = " \t\n\v\f\r"
PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that is found in text by its spelling.

    Args:
        text: spelling of the token.
        token_id: its id.
        is_hidden: whether it is found only where special tokens are asked for.
        eats_spaces: whether white space after it belongs to it.
        letters: distinct characters of its spelling.
    """

    text: str
    token_id: int
    is_hidden: bool
    eats_spaces: bool
    letters: frozenset[str]

    def cut(self, text: str) -> list[str | int]:
        """Replace the token's spelling in `text` by its id; drop empty pieces."""
        first, *others = text.split(self.text)
        parts: list[str | int] = [first] if first else []
        for other in others:
            rest = other.lstrip(SPACES) if self.eats_spaces else other
            parts += [self.token_id, rest] if rest else [self.token_id]
        return parts


class SpecialTokens:
    """The special tokens of a vocabulary.

    The longest is searched first, the next one in the pieces that are left, and so on.

    Attributes:
        eats_spaces: whether white space after one of them may belong to it.
    """

    def __init__(self, tokens: list[SpecialToken]) -> None:
        self._tokens = sorted(tokens, key=lambda token: -len(token.text.encode()))
        self.eats_spaces = any(token.eats_spaces for token in tokens)

    @classmethod
    def of(cls, vocab: Vocabulary, model_name: str) -> SpecialTokens:
        """Return the special tokens of a vocabulary.

        In Phi-3 models, which only their name tells, they eat the spaces after them.
        """
        name = model_name.lower()
        is_phi3 = "phi-3" in name or "phi3" in name
        return cls(
            [
                SpecialToken(
                    text,
                    token_id,
                    is_hidden=bool(kind & (CONTROL | UNKNOWN)),
                    eats_spaces=is_phi3 and text not in PHI3_KEEPS_SPACES,
                    letters=frozenset(text),
                )
                for token_id, (text, kind) in enumerate(zip(vocab.tokens, vocab.kinds, strict=True))
                if kind & (CONTROL | UNKNOWN | USER_DEFINED)
            ]
        )

    def split(self, text: str, parse_special: bool) -> list[str | int]:
        """Return the pieces of plain text and the ids of special tokens, in order."""
        parts: list[str | int] = [text] if text else []
        letters = set(text)
        for token in self._tokens:
            if token.is_hidden and not parse_special:
                continue
            if token.letters <= letters and token.text in text:
                parts = [
                    piece
                    for part in parts
                    for piece in ([part] if isinstance(part, int) else token.cut(part))
                ]
        return parts
