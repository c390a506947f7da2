"""Sampling of a pass's rows where their logits are: on a GPU, or by the host."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from engine.backends.executor import RankOutOfMemory
from engine.errors import EngineError
from engine.hardware.backend_choice import captures_tokens
from engine.model.forward.batch import captured_rows

if TYPE_CHECKING:
    from torch import Tensor

    from engine.backends.executor import RankExecutor
    from engine.backends.gpu.decode.sampling import RowSampler, SampledRow
    from engine.decoding.sampling.sampler import Logits, SamplingRequest
    from engine.runtime.rank import Rank

log = logging.getLogger(__name__)


class RowSampling:
    """Sampling of rows on the rank that has their logits.

    Args:
        executor: executor of the ranks.
        rank: the first rank of the output head.
        n_vocab: number of tokens of the vocabulary.
    """

    def __init__(self, executor: RankExecutor, rank: Rank, n_vocab: int) -> None:
        self._executor, self._rank, self._n_vocab = executor, rank.number, n_vocab
        self._sampler: RowSampler | None = None
        backend = rank.backend
        self._is_possible = backend.captures and backend.samples and captures_tokens()

    def results(
        self, logits: Tensor, ids: Sequence[int], wishes: Sequence[SamplingRequest | None]
    ) -> list[int | Logits]:
        """Return the next token of each row, or its logits (n_vocab,) where the host samples.

        Args:
            logits: F32 (n, n_vocab) on the rank's device.
            ids: token of each row.
            wishes: how each row is to be sampled; None where the host does.
        """
        if not self._is_possible or not any(wishes):
            return list(logits.cpu().numpy())
        from engine.backends.gpu.decode.sampling import SampledRow

        rows = list[SampledRow]()
        for row, (token, wish) in enumerate(zip(ids, wishes, strict=True)):
            if wish is not None:
                with suppress(EngineError):  # the host raises it once more, for this row alone
                    mask = wish.allowed() if wish.allowed else None
                    rows.append(SampledRow(row, token, wish.sampler, wish.never, mask))
        tokens = self._sampled(logits, rows) if rows else {}
        rest = [row for row in range(len(ids)) if row not in tokens]
        on_host = iter(logits[rest].cpu().numpy() if rest else ())
        return [tokens[row] if row in tokens else next(on_host) for row in range(len(ids))]

    def _sampled(self, logits: Tensor, rows: Sequence[SampledRow]) -> dict[int, int]:
        """Return the tokens that the device samples, by row."""
        sampler = self._sampler_for(len(rows))
        if sampler is None:
            return {}
        found = self._executor.call_inline(
            lambda rank: sampler.sample(logits, rows) if rank == self._rank else []
        )
        tokens = zip(rows, found[self._rank], strict=True)
        return {row.row: token for row, token in tokens if token is not None}

    def _sampler_for(self, n: int) -> RowSampler | None:
        """Return a sampler with at least n slots; None if there is no memory for it."""
        if self._sampler is None or self._sampler.n_slot < n:
            from engine.backends.gpu.decode.sampling import RowSampler

            self._sampler = None  # its memory is free before there is more
            device, n_slot = self._executor.devices[self._rank], captured_rows(n)
            try:
                found = self._executor.run(
                    lambda rank: (
                        RowSampler(device, self._n_vocab, n_slot) if rank == self._rank else None
                    )
                )
            except RankOutOfMemory as error:
                log.warning("the host samples the tokens of several sequences: %s", error)
                self._is_possible = False
                return None
            self._sampler = found[self._rank]
        return self._sampler
