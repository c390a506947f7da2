"""Matches grammars against one model's tokens."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.decoding.grammar.checker import compiled
from engine.decoding.grammar.schema import short_problem
from engine.errors import GrammarError
from engine.sampling_params import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from engine.text.tokenizer import Tokenizer

Mask: TypeAlias = NDArray[np.bool_]  # whether each token of a vocabulary is allowed, (n_vocab,)


class Matcher:
    """Matcher for one grammar, with the n tokens accepted so far."""

    def __init__(self, inner: LLMatcher, n_vocab: int, trigger: str = "", lead: str = "") -> None:
        self._inner, self._n_vocab = inner, n_vocab
        self.trigger, self.lead = trigger, lead
        self.n = 0

    def copy(self) -> Matcher:
        """Return a fresh matcher for the same grammar."""
        other = Matcher(self._inner.deep_copy(), self._n_vocab, self.trigger, self.lead)
        other._inner.reset()
        return other

    @property
    def is_over(self) -> bool:
        """Whether the text matches and cannot be continued."""
        return self._inner.is_stopped() and not self._inner.is_error()

    def allowed(self) -> Mask:
        """Return the allowed next tokens, including end-of-generation tokens if the text matches.

        Raises:
            GrammarError: matching has become too complex.
        """
        bits = np.frombuffer(self._inner.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._n_vocab, bitorder="little").view(np.bool_)

    def can_accept(self, token: int) -> bool:
        """Return whether a token is allowed next."""
        return self._inner.validate_tokens([token]) == 1

    def accept(self, token: int) -> None:
        """Accept the next token.

        Raises:
            GrammarError: it is not allowed.
        """
        self._inner.consume_token(token)
        self._check()
        self.n += 1

    def rewind(self, n: int) -> None:
        """Go back to the first n tokens."""
        if n < self.n:
            self._inner.rollback(self.n - n)
            self._check()
            self.n = n

    def _check(self) -> None:
        if self._inner.is_error():
            problem = short_problem(self._inner.get_error())
            raise GrammarError(
                "The answer cannot continue in the required format: {problem}.", problem=problem
            )


class MaskVocabulary:
    """A model's vocabulary for grammars; expensive parts are built once, on first use.

    Thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiling = threading.Lock()  # one grammar at a time; it may take seconds
        self._inside: dict[bytes, list[int]] = {}
        self.eog_ids = sorted(tokenizer.eog_ids)

    @property
    def n(self) -> int:
        """Number of tokens."""
        return self._tokenizer.n_vocab

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher for a grammar.

        Raises:
            GrammarError: the grammar cannot be used; see `engine.decoding.grammar.checker`.
        """
        with self._lock:
            tokenizer = self._compiled
        with self._compiling:
            inner = compiled(grammar, tokenizer)
        return Matcher(inner, self.n, grammar.trigger, grammar.lead)

    def bytes_of(self, token: int) -> bytes:
        """Return a token's bytes, even if it is hidden in texts."""
        return self._tokenizer.token_bytes(token)

    def encode(self, text: bytes) -> list[int]:
        """Return tokens that spell these bytes, tokenised as the model would if possible."""
        ids = self._tokenizer.encode_inner(text.decode("utf-8", "replace"))
        if b"".join(map(self.bytes_of, ids)) == text:
            return ids
        return list(self._longest_first(text))

    def with_bytes(self, text: bytes) -> Sequence[int]:
        """Return the tokens that have exactly these bytes."""
        begin = bisect_left(self._sorted, (text, -1))
        return [token for _, token in self._from(begin, lambda spelled: spelled == text)]

    def longer_than(self, text: bytes) -> list[tuple[bytes, int]]:
        """Return the longer tokens that begin with these bytes, and the bytes of each."""
        begin = bisect_left(self._sorted, (text, self.n))
        return list(self._from(begin, lambda spelled: spelled.startswith(text)))

    def beyond(self, text: bytes) -> list[int]:
        """Return the tokens that contain these bytes, but neither begin nor end with them."""
        with self._lock:
            if text not in self._inside:
                self._inside[text] = [
                    token
                    for spelled, token in self._sorted
                    if text in spelled[1:-1] and not spelled.startswith(text)
                ]
            return self._inside[text]

    def _from(self, at: int, holds: Callable[[bytes], bool]) -> Iterator[tuple[bytes, int]]:
        while at < len(self._sorted) and holds(self._sorted[at][0]):
            yield self._sorted[at]
            at += 1

    def _longest_first(self, text: bytes) -> Iterator[int]:
        """Yield tokens that spell the bytes, the longest match at each position."""
        while text:
            sizes = range(min(len(text), self._longest), 0, -1)
            ids = next((ids for n in sizes if (ids := self.with_bytes(text[:n]))), None)
            if ids is None:
                return
            yield ids[0]
            text = text[len(self.bytes_of(ids[0])) :]

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        spelled = ((self.bytes_of(token), token) for token in range(self.n))
        return sorted(pair for pair in spelled if pair[0])

    @cached_property
    def _longest(self) -> int:
        return max((len(text) for text, _ in self._sorted), default=1)

    @cached_property
    def _compiled(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        wrapped: Any = _Wrapped(self)  # duck-typed like llguidance's own wrappers
        return LLTokenizer(wrapped, eos_token=self.eog_ids or None)

    def is_hidden(self, token: int) -> bool:
        """Return whether a token adds nothing to a text, so that grammars have to refer to it as a
        token."""
        return self._tokenizer.is_hidden(token)


class _Wrapped:
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
