"""Interface of a loaded model on its ranks, be these threads of this process or processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.layers.hparams import HParams
    from engine.runtime.rank import Rank
    from engine.sampling.token_source import Logits, TokenSource


class Runtime(Protocol):
    """What computes tokens and holds the cache; `generation.session` keeps count of it.

    Attributes:
        n_ctx: context in tokens.
        n_batch: largest number of prompt tokens in a pass.
        can_rewind: the cache can forget its last tokens; recurrent states cannot.
    """

    hp: HParams
    n_ctx: int
    n_batch: int
    can_rewind: bool

    @property
    def ranks(self) -> Sequence[Rank]:
        """Ranks of this process, in their order; empty once closed."""
        ...

    @property
    def stream(self) -> TokenSource | None:
        """What samples tokens where they are computed; None where the host samples all."""
        ...

    def forward(self, ids: Sequence[int], n_past: int, first_logit: int) -> Logits:
        """Run tokens after `n_past` cached ones.

        Args:
            first_logit: index into `ids` of the first token whose logits are wanted.

        Returns:
            (len(ids) - first_logit, n_vocab), or this process's slice of the vocabulary.

        Raises:
            EngineError: the model was closed, a device ran out of memory or a rank was lost; what
                the cache holds from `n_past` on is then undefined.
        """
        ...

    def save_recurrent(self) -> None:
        """Keep a copy of all recurrent states as they are now."""
        ...

    def restore_recurrent(self) -> None:
        """Go back to the copy of the recurrent states."""
        ...

    def close(self) -> None:
        """Free everything; safe to call twice."""
        ...
