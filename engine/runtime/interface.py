"""Interface of a loaded model on its ranks, whether these are threads or processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.model.forward.pages import PAGE

if TYPE_CHECKING:
    from torch import Tensor

    from engine.decoding.sampling.sampler import Logits, Sampler, SamplingRequest
    from engine.model.forward.batch import Batch, Piece
    from engine.model.forward.pages import AttentionWindow
    from engine.model.forward.state import CacheSize
    from engine.runtime.rank import Rank

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


class Guesser(Protocol):
    """The MTP blocks of a loaded model, which guess what follows tokens of several sequences.

    One that is alone guesses any number of tokens, one after the other. Of several, the first
    guesses the first token, the second the one behind it, and so on.
    """

    @property
    def max_drafts(self) -> int:
        """Largest number of drafts in a row; 0 for any number."""
        ...

    def draft(self, ids: Sequence[int], batch: Batch, number: int = 0) -> Logits:
        """Return logits of what follows tokens, (n, n_vocab), as a block sees it.

        Args:
            ids: a token of each sequence: the next one to compute, or the guess made last.
            batch: where they belong, as in the pass that will compute them; there are pages.
            number: number of guesses before, which were made right before this one.

        Raises:
            EngineError: see `PagedRuntime.forward`.
        """
        ...

    def forget_hidden_states(self, seat: int) -> None:
        """Forget what a sequence has left behind whose number another one has now."""
        ...


class PagedRuntime(Protocol):
    """A loaded model that computes tokens of several sequences, and holds what they remember.

    It does not know which tokens its pages hold: `generation.cache_manager` keeps count of that.

    `runtime.model_runner` implements it for ranks that are threads of this process (a
    `ThreadRuntime` owns it, loads and re-splits it), `distributed.machine_runner` for ranks of
    several machines.

    Attributes:
        n_vocab: number of tokens of the vocabulary.
        n_ctx: largest number of tokens of a sequence.
        n_batch: largest number of rows of a pass.
        can_rewind: whether all of the cache lies in pages, so that its last tokens can be dropped;
            recurrent states cannot go back.
        groups: the groups of layers, which each have a table in `Piece.tables`, in this order.
        n_slots: number of places for the recurrent states of sequences, 1 at least.
    """

    n_vocab: int
    n_ctx: int
    n_batch: int
    can_rewind: bool
    groups: Sequence[PageGroup]
    n_slots: int

    @property
    def most_checked_rows(self) -> int:
        """Largest number of rows of a pass that checks guesses.

        Up to it, a row has the bits that it has alone.
        """
        ...

    @property
    def drafter(self) -> Guesser | None:
        """MTP block of the model; None without one."""
        ...

    @property
    def ranks(self) -> Sequence[Rank]:
        """Ranks of this process, in their order; empty once closed."""
        ...

    @property
    def token_source(self) -> TokenSource | None:
        """Source of tokens sampled where they are computed; None if the host samples all.

        It serves a sequence that is computed alone; whoever else computes must stop it first.
        """
        ...

    @property
    def n_running(self) -> int:
        """Number of tokens that `forward` has started and devices have not computed yet.

        Raises:
            EngineError: a device has failed meanwhile, see `forward`.
        """
        ...

    def forward(self, ids: Sequence[int], batch: Batch) -> Logits:
        """Run tokens of one or several sequences and return their logits.

        Args:
            ids: ids of the tokens, of one piece after the other.
            batch: what each row is. The pages of its tables must not be used otherwise until the
                pass has ended. If no logits are wanted, devices may still compute afterwards: what
                fails there is raised by a later call, by `finish` at the latest.

        Returns:
            (len(ids) - batch.first_logit, n_vocab); if the batch wants hidden states,
            (len(ids) - batch.first_logit, n_embd).

        Raises:
            EngineError: the model was closed, a device ran out of memory or a rank was lost; what
                the cache holds is then undefined.
        """
        ...

    def finish(self) -> None:
        """Wait until devices have computed all tokens that were started.

        Raises:
            EngineError: see `forward`.
        """
        ...

    def sample(
        self, ids: Sequence[int], batch: Batch, wishes: Sequence[SamplingRequest | None]
    ) -> Sequence[int | Logits]:
        """Run tokens like `forward`, and sample the next ones on a device where that can do it.

        Random numbers are taken from the samplers, which accept the tokens later.

        Args:
            wishes: how to sample behind each of the rows from `batch.first_logit` on; None where
                logits are wanted.

        Returns:
            For each of these rows the next token, or logits (n_vocab,) from which the host samples.
        """
        ...

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Copy a page of a group on all ranks, behind what was started before."""
        ...

    def clear_slot(self, slot: int) -> None:
        """Make the recurrent states of a place those of an empty sequence."""
        ...

    def save_slot(self, slot: int) -> tuple[SlotState, int]:
        """Return a copy of the recurrent states of a place, and its bytes."""
        ...

    def load_slot(self, slot: int, state: SlotState) -> None:
        """Make the recurrent states of a place those of a copy."""
        ...
