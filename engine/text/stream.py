"""Text from tokens as they come, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Turns token ids into text one by one; a character appears when its last byte has come.

    Args:
        token_bytes: the bytes that a token adds; none for one that is not shown.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The text that is complete now; may be empty."""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """The rest: bytes that never became a character, as U+FFFD; then start afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
