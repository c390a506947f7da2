"""Matchers of grammars against the tokens of one model."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.decoding.grammar.checker import compiled
from engine.decoding.grammar.schema import told
from engine.errors import GrammarError
from engine.sampling_params import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from engine.text.tokenizer import Tokenizer

Mask: TypeAlias = NDArray[np.bool_]
"""Which tokens of a vocabulary are allowed, (n_vocab,)."""


class Matcher:
    """Matcher of one grammar, with the tokens that it has accepted so far.

    Attributes:
        trigger, lead: see `Grammar`.
        n: number of tokens that it has accepted.
    """

    def __init__(self, found: LLMatcher, n_vocab: int, trigger: str = "", lead: str = "") -> None:
        self._found, self._n_vocab = found, n_vocab
        self.trigger, self.lead = trigger, lead
        self.n = 0

    def copy(self) -> Matcher:
        """Return another one of the same grammar, of which nothing has been said."""
        other = Matcher(self._found.deep_copy(), self._n_vocab, self.trigger, self.lead)
        other._found.reset()
        return other

    @property
    def is_over(self) -> bool:
        """Whether the text has the form, and nothing more may come."""
        return self._found.is_stopped() and not self._found.is_error()

    def allowed(self) -> Mask:
        """Return which tokens may come next, with those of the end where the text has the form.

        Raises:
            GrammarError: it has become too complex.
        """
        bits = np.frombuffer(self._found.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._n_vocab, bitorder="little").view(np.bool_)

    def can_accept(self, token: int) -> bool:
        """Return whether a token may come next."""
        return self._found.validate_tokens([token]) == 1

    def accept(self, token: int) -> None:
        """Take the next token.

        Raises:
            GrammarError: it is not allowed.
        """
        self._found.consume_token(token)
        self._check()
        self.n += 1

    def rewind(self, n: int) -> None:
        """Go back to the first n tokens."""
        if n < self.n:
            self._found.rollback(self.n - n)
            self._check()
            self.n = n

    def _check(self) -> None:
        if self._found.is_error():
            raise GrammarError(
                f"The answer cannot go on in its form: {told(self._found.get_error())}."
            )


class MaskVocabulary:
    """The vocabulary of a model as grammars see it; what takes time is made once, when it is used.

    Threads may share it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiling = threading.Lock()  # one grammar at a time, which may take seconds
        self._inside: dict[bytes, list[int]] = {}
        self.eog_ids = sorted(tokenizer.eog_ids)

    @property
    def n(self) -> int:
        """Number of tokens."""
        return self._tokenizer.n_vocab

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return the matcher of a grammar.

        Raises:
            GrammarError: the grammar cannot be used; see `engine.decoding.grammar.checker`.
        """
        with self._lock:
            tokenizer = self._compiled
        with self._compiling:
            found = compiled(grammar, tokenizer)
        return Matcher(found, self.n, grammar.trigger, grammar.lead)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token, also of one that is hidden in texts."""
        return self._tokenizer.token_bytes(token)

    def encode(self, text: bytes) -> list[int]:
        """Return tokens that spell bytes, as the model would choose them if that is possible."""
        ids = self._tokenizer.encode_inner(text.decode("utf-8", "replace"))
        if b"".join(map(self.bytes_of, ids)) == text:
            return ids
        return list(self._longest_first(text))

    def with_bytes(self, text: bytes) -> Sequence[int]:
        """Return the tokens that have exactly these bytes."""
        begin = bisect_left(self._sorted, (text, -1))
        return [token for _, token in self._from(begin, lambda found: found == text)]

    def longer_than(self, text: bytes) -> list[tuple[bytes, int]]:
        """Return the tokens that begin with some bytes and have more, with their bytes."""
        begin = bisect_left(self._sorted, (text, self.n))
        return list(self._from(begin, lambda found: found.startswith(text)))

    def beyond(self, text: bytes) -> list[int]:
        """Return the tokens in which some bytes come neither at the beginning nor at the end."""
        with self._lock:
            if text not in self._inside:
                self._inside[text] = [
                    token
                    for found, token in self._sorted
                    if text in found[1:-1] and not found.startswith(text)
                ]
            return self._inside[text]

    def _from(self, at: int, holds: Callable[[bytes], bool]) -> Iterator[tuple[bytes, int]]:
        while at < len(self._sorted) and holds(self._sorted[at][0]):
            yield self._sorted[at]
            at += 1

    def _longest_first(self, text: bytes) -> Iterator[int]:
        """Yield tokens that spell bytes, the longest one that fits at each place."""
        while text:
            sizes = range(min(len(text), self._longest), 0, -1)
            found = next((ids for n in sizes if (ids := self.with_bytes(text[:n]))), None)
            if found is None:
                return
            yield found[0]
            text = text[len(self.bytes_of(found[0])) :]

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        """The tokens in the order of their bytes, without those that have none."""
        spelled = ((self.bytes_of(token), token) for token in range(self.n))
        return sorted(pair for pair in spelled if pair[0])

    @cached_property
    def _longest(self) -> int:
        """Largest number of bytes of a token."""
        return max((len(text) for text, _ in self._sorted), default=1)

    @cached_property
    def _compiled(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        wrapped: Any = _Wrapped(self)  # which has what it asks of its own wrappers
        return LLTokenizer(wrapped, eos_token=self.eog_ids or None)

    def is_hidden(self, token: int) -> bool:
        """Return whether a token adds nothing to a text, so that grammars name it as a token."""
        return self._tokenizer.is_hidden(token)


class _Wrapped:
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: MaskVocabulary) -> None:
        self._vocabulary = vocabulary
        tokens = range(vocabulary.n)
        self.tokens = [vocabulary.bytes_of(token) for token in tokens]
        self.special_token_ids = [token for token in tokens if vocabulary.is_hidden(token)]
        self.eos_token_id = vocabulary.eog_ids[0] if vocabulary.eog_ids else None
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.encode(text.encode())
