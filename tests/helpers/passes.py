"""Forward passes of one sequence that has the cache alone."""

from collections.abc import Sequence

from engine.forward.batch import Batch, Piece
from engine.paging.alone import tables_alone
from engine.runtime.interface import Runtime
from engine.sampling.token_source import Logits


def forward_alone(
    runtime: Runtime, ids: Sequence[int], n_past: int, first_logit: int = 0
) -> Logits:
    """Run `ids` after `n_past` cached tokens; return the logits from `first_logit` on."""
    tables = tables_alone([group.n_pages for group in runtime.groups], n_past + len(ids))
    return runtime.forward(ids, Batch((Piece(n_past, len(ids), tables),), first_logit))
