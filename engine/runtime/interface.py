"""Types of what a model runner offers: groups of pages, copies of states, sources of tokens."""

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
"""Copy of one sequence's recurrent states in the host's memory, whatever the split.

For each layer that has one, in order, its tensors as a single rank would have them: F32, all units
in order (`RecurrentState.whole_shapes`). So it can be loaded after a re-split, and saved to a file.
Ranks that are processes keep their parts instead; then it only stands for them.
"""

Guard = Callable[[str, int], AbstractContextManager[None]]
"""Function that returns the context of a call on the ranks, which explains failures.

It is given the purpose, such as "to compute the next tokens", and the number of tokens.
"""


class TokenSource(Protocol):
    """Sampler of tokens on the device, which may run some tokens ahead of their reader.

    It serves one sequence that is computed alone. Whoever else computes must stop it first.
    """

    @property
    def waited_s(self) -> float:
        """Total time in which the host only waited for the device, in seconds."""
        ...

    @property
    def is_beyond(self) -> bool:
        """Whether the token read last may have been run already, which cannot be undone."""
        ...

    def serve(self, sampler: Sampler, never: Sequence[int]) -> bool:
        """Sample as `sampler` would from now on; return False where the host must sample.

        Called before each token.

        Args:
            sampler: settings, history and random numbers.
            never: ids of tokens that must not come.
        """
        ...

    def next(self, token: int, piece: Piece, n_left: int) -> int | Logits | None:
        """Run a token, and sample the next one.

        The random number is taken from the sampler, which has already accepted `token`.

        Args:
            token: id of the token to run.
            piece: where it belongs: one token of a sequence, whose tables have pages for `n_left`
                tokens. They are those of the last call unless its `n_left` was 1.
            n_left: number of tokens that may still be sampled, with this one; no more are computed.

        Returns:
            The sampled token; or logits (n_vocab,), from which `sampler` must sample; or None if
            these are lost too and the content of the states is unknown.
        """
        ...

    def hold(self, n: int) -> bool:
        """Run nothing ahead of the reader for the next n tokens, so that nothing is run in vain.

        Returns:
            Whether nothing is under way, so that others may compute; else after some calls of
            `next`. States have not seen the token read last then, see `is_beyond`.
        """
        ...

    def stop(self) -> Sequence[int]:
        """Wait until the device has finished all tokens.

        Returns:
            Tokens that were run after the last one given to `next` and cannot be undone, so that
            the cache holds them; none where the cache can rewind.
        """
        ...


class PageGroup(NamedTuple):
    """Layers that see equally far back, as a runtime has them.

    Attributes:
        n_pages: number of pages of the cache of each of these layers.
        window: how far back the layers see.
    """

    n_pages: int
    window: AttentionWindow


def page_groups(size: CacheSize, windows: Sequence[AttentionWindow]) -> Sequence[PageGroup]:
    """Return the groups of a cache.

    Args:
        windows: window of each group, see `windows_of`.
    """
    return [PageGroup(size.n_held(window) // PAGE, window) for window in windows]
