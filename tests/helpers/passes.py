"""Forward passes of one sequence that has the cache alone."""

from collections.abc import Sequence

from engine.decoding.sampling.sampler import Logits
from engine.model.forward.batch import Batch, Piece
from engine.model.forward.pages import PAGE
from engine.runtime.model_runner import ModelRunner


def forward_alone(
    runtime: ModelRunner, ids: Sequence[int], n_past: int, first_logit: int = 0
) -> Logits:
    """Run `ids` after `n_past` cached tokens; return the logits from `first_logit` on.

    Pages are used in turn, so that what layers with a window see no more is overwritten.
    """
    n_pages = -(-(n_past + len(ids)) // PAGE)
    tables = tuple([i % group.n_pages for i in range(n_pages)] for group in runtime.groups)
    return runtime.forward(ids, Batch((Piece(n_past, len(ids), tables),), first_logit))
