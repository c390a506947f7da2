"""Interfaces to a model runner: page groups, copies of states, token sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.model.forward.pages import PAGE

if TYPE_CHECKING:
    from torch import Tensor

    from engine.decoding.sampling.sampler import Logits, Sampler
    from engine.model.forward.batch import Piece
    from engine.model.forward.pages import AttentionWindow
    from engine.model.forward.state import CacheSize

SlotState = Sequence["Mapping[str, Tensor]"]
"""Copy of one sequence's recurrent states in host memory, independent of the split.

It has each recurrent layer's tensors, in order, as a single rank would have them: F32, all units in
order (`RecurrentState.whole_shapes`). So it can be loaded after a re-split or saved to a file. With
several machines it is a reference, and each machine keeps its part.
"""

Guard = Callable[[str, int], AbstractContextManager[None]]
"""Returns the context for a call on the ranks, which explains failures, given the call's purpose,
such as "to compute the next tokens", and the number of tokens."""


class TokenSource(Protocol):
    """Sampler of tokens on a device, which may run some tokens ahead of their reader.

    It serves a single sequence at a time, and must be stopped before any other computation.
    """

    @property
    def waited_s(self) -> float:
        """Total seconds in which the host only waited for the device."""
        ...

    @property
    def is_beyond(self) -> bool:
        """Whether the last token read may already have been computed, which cannot be undone."""
        ...

    def serve(self, sampler: Sampler, never: Sequence[int]) -> bool:
        """From now on, sample as `sampler` would; return False if the host must sample.

        This is called before each token; `never` has token ids that must not be sampled.
        """
        ...

    def next(self, token: int, piece: Piece, n_left: int) -> int | Logits | None:
        """Compute a token and sample the next one.

        The random number is taken from the sampler, which has already accepted `token`.

        Args:
            token: id of the token to compute.
            piece: its position, with tables that have pages for `n_left` tokens. They must be the
                tables of the last call unless its `n_left` was 1.
            n_left: maximum number of tokens to sample from here on, including this one.

        Returns:
            The sampled token; or logits (n_vocab,), from which `sampler` must sample; or None if
            the logits are also lost and the states are undefined.
        """
        ...

    def hold(self, n: int) -> bool:
        """Run nothing ahead of the reader for the next n tokens, so that no work is wasted.

        Returns:
            Whether nothing is running, so that others may compute; otherwise this takes some calls
            to `next`. The states then do not include the last token read; see `is_beyond`.
        """
        ...

    def stop(self) -> Sequence[int]:
        """Wait until the device has finished all tokens.

        Returns:
            Tokens that were computed after the last one given to `next` and cannot be undone, so
            that they stay in the cache; none if the cache can rewind.
        """
        ...


class PageGroup(NamedTuple):
    """Layers with the same attention window, each with a cache of `n_pages` pages."""

    n_pages: int
    window: AttentionWindow


def page_groups(size: CacheSize, windows: Sequence[AttentionWindow]) -> Sequence[PageGroup]:
    """Return a cache's groups, given each group's window; see `windows_of`."""
    return [PageGroup(size.n_held(window) // PAGE, window) for window in windows]
