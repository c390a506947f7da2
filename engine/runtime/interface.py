"""Interface of a loaded model on its ranks, whether these are threads or processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.runtime.rank import Rank
    from engine.sampling.token_source import Logits, TokenSource

Guard = Callable[[str, int], AbstractContextManager[None]]
"""Function that returns the context of a call on the ranks, which explains failures.

It is given the purpose, such as "to compute the next tokens", and the number of tokens.
"""


class Runtime(Protocol):
    """A loaded model that computes tokens and holds the KV cache.

    It does not know which tokens the cache holds: `generation.session` keeps count of that.

    `runtime.model_runner` implements it for ranks that are threads of this process (a
    `ThreadRuntime` owns it, loads and re-splits it), `distributed.process_runtime` for processes.

    Attributes:
        n_vocab: number of tokens of the vocabulary.
        n_ctx: size of the context in tokens.
        n_batch: largest number of prompt tokens in a forward pass.
        can_rewind: whether the cache can drop its last tokens; recurrent states cannot.
    """

    n_vocab: int
    n_ctx: int
    n_batch: int
    can_rewind: bool

    @property
    def ranks(self) -> Sequence[Rank]:
        """Ranks of this process, in their order; empty once closed."""
        ...

    @property
    def token_source(self) -> TokenSource | None:
        """Source of tokens sampled where they are computed; None if the host samples all."""
        ...

    @property
    def n_running(self) -> int:
        """Number of tokens that `forward` has started and devices have not computed yet.

        Raises:
            EngineError: a device has failed meanwhile, see `forward`.
        """
        ...

    def forward(self, ids: Sequence[int], n_past: int, first_logit: int) -> Logits:
        """Run tokens after `n_past` cached ones and return their logits.

        Args:
            ids: ids of the tokens.
            n_past: number of cached tokens.
            first_logit: index into `ids` of the first token whose logits are wanted. With
                `len(ids)` there are none, and devices may still compute afterwards: what fails
                there is raised by a later call, by `finish` at the latest.

        Returns:
            (len(ids) - first_logit, n_vocab), or this process's slice of the vocabulary.

        Raises:
            EngineError: the model was closed, a device ran out of memory or a rank was lost; what
                the cache holds from `n_past` on is then undefined.
        """
        ...

    def finish(self) -> None:
        """Wait until devices have computed all tokens that were started.

        Raises:
            EngineError: see `forward`.
        """
        ...

    def save_recurrent(self) -> None:
        """Save a copy of all recurrent states, in place of an earlier one."""
        ...

    def restore_recurrent(self) -> None:
        """Restore all recurrent states from the saved copy."""
        ...

    def close(self) -> None:
        """Free everything; safe to call twice."""
        ...
