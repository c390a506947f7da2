"""Decodes tokens to text as they come, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Decoder of single token ids; a character appears when its last byte has come.

    Args:
        token_bytes: function that returns the bytes a token adds; none for a hidden token.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def begun(self) -> bytes:
        """Bytes of a character whose last byte has not come yet."""
        return self._decoder.getstate()[0]

    @begun.setter
    def begun(self, value: bytes) -> None:
        self._decoder.setstate((value, 0))

    def feed(self, token_id: int) -> str:
        """Add a token and return the text that is complete now; may be empty."""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """Return leftover bytes that never became a character, as U+FFFD, and start afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
