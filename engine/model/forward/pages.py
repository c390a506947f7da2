"""Keys of KV cache pages, each of which identifies a page's tokens and all tokens before it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

PAGE = 256  # tokens per page
GONE = -1  # page table entry for a page that no later token attends to
ROOT = b""  # key before the first page


def page_key(before: bytes, ids: Sequence[int]) -> bytes:
    """Return the key of a complete page with tokens `ids`, after the page with key `before`."""
    return blake2b(before + array("q", ids).tobytes(), digest_size=16).digest()


def page_keys(ids: Sequence[int], known: Sequence[bytes] = ()) -> list[bytes]:
    """Return the keys of all complete pages of a sequence; `known` contains the first few."""
    keys = list(known)
    for start in range(len(keys) * PAGE, len(ids) - PAGE + 1, PAGE):
        keys.append(page_key(keys[-1] if keys else ROOT, ids[start : start + PAGE]))
    return keys


def n_alike(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """Attention window of a group of layers.

    Attributes:
        n: number of tokens; None for no limit.
        is_chunked: whether attention is limited to chunks of `n` tokens (Llama 4), rather than to
            the last `n` tokens, including the current one.
    """

    n: int | None = None
    is_chunked: bool = False

    def first_seen(self, position: int) -> int:
        """Return the first position that a token attends to."""
        if self.n is None:
            return 0
        if self.is_chunked:
            return position // self.n * self.n
        return max(0, position - self.n + 1)

    def n_pages(self, n_ctx: int, n_batch: int) -> int:
        """Return the maximum number of pages that a sequence of `n_ctx` tokens needs at a time, if
        up to `n_batch` tokens are computed per pass."""
        whole = -(-n_ctx // PAGE)
        if self.n is None:
            return whole
        return min(whole, -(-(self.n + n_batch - 2) // PAGE) + 1)


NO_WINDOW = AttentionWindow()  # window of full-attention layers


def in_order(windows: Iterable[AttentionWindow]) -> tuple[AttentionWindow, ...]:
    """Return the distinct windows: full attention first, then by descending width."""
    return tuple(sorted(set(windows), key=lambda s: (s.n is not None, -(s.n or 0), s.is_chunked)))
