"""Encodes text as SentencePiece does: join the adjacent pieces whose token scores highest, repeat.

Ties go to the leftmost pair. No merge list could do it: tokens may share a score, and a token can
be reached from parts that no merge rule would name, so pairs are looked up in the vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from operator import add

SPACE = "\u2581"
CACHED_WORD = 64  # characters of the longest word to cache
CACHED_WORDS = 50_000  # number of words to cache
PART = 4096  # number of ids that a part of a text has, or some more


class SpmEncoder:
    """Encoder of text without special tokens into ids.

    Args:
        ids: id of each token.
        scores: score of each token, by id.
        unk_id: id for a character that is neither a token nor made of byte tokens; None drops it.
    """

    def __init__(self, ids: dict[str, int], scores: Sequence[float], unk_id: int | None) -> None:
        self._ids = ids
        self._scores = scores
        self._unk = [] if unk_id is None else [unk_id]
        self._bytes = [ids.get(f"<0x{byte:02X}>", ids.get(chr(byte))) for byte in range(256)]
        self._inner_pairs: set[str] = set()
        for token in ids:
            self._inner_pairs.update(map(add, token, token[1:]))
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return [*chain.from_iterable(self.parts(text))]

    def parts(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of a text in parts."""
        output: list[int] = []
        for word in self._words(text.replace(" ", SPACE)):
            known = self._cache.get(word)
            output += self._encode_word(word) if known is None else known
            if len(output) >= PART:
                yield output
                output = []
        yield output

    def _words(self, text: str) -> Iterator[str]:
        """Cut between characters that are adjacent in no token, as no merge can cross there."""
        start = 0
        for end, pair in enumerate(map(add, text, text[1:]), start=1):
            if pair not in self._inner_pairs:
                yield text[start:end]
                start = end
        yield text[start:]

    def _encode_word(self, word: str) -> list[int]:
        output: list[int] = []
        for piece in self._merge(word):
            token_id = self._ids.get(piece)
            output += self._spell(piece) if token_id is None else [token_id]
        if len(word) <= CACHED_WORD:
            if len(self._cache) >= CACHED_WORDS:
                self._cache.clear()
            self._cache[word] = output
        return output

    def _merge(self, word: str) -> list[str]:
        pieces: list[str] = list(word)  # "" once merged into the piece on the left
        following = list(range(1, len(pieces) + 1))
        preceding = list(range(-1, len(pieces) - 1))
        queue: list[tuple[float, int, int, str]] = []

        def consider(left: int, right: int) -> None:
            text = pieces[left] + pieces[right]
            token_id = self._ids.get(text)
            if token_id is not None:
                heapq.heappush(queue, (-self._scores[token_id], left, right, text))

        for left, right in pairwise(range(len(pieces))):
            consider(left, right)
        while queue:
            _, left, right, text = heapq.heappop(queue)
            if pieces[left] + pieces[right] != text or not (pieces[left] and pieces[right]):
                continue  # one of the two has been merged since
            pieces[left], pieces[right] = text, ""
            following[left] = after = following[right]
            if after < len(pieces):
                preceding[after] = left
                consider(left, after)
            if preceding[left] >= 0:
                consider(preceding[left], left)
        return [piece for piece in pieces if piece]

    def _spell(self, char: str) -> list[int]:
        """Return the ids of a character that is not a token: of its bytes, or the unknown token."""
        spelled = [self._bytes[byte] for byte in char.encode()]
        known = [token_id for token_id in spelled if token_id is not None]
        return known if len(known) == len(spelled) else self._unk
