"""Sampling from a pass's rows on the GPU that has their logits, or on the host."""

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
    """Sampler of rows on the rank that has their logits.

    Args:
        executor: executor that runs the ranks.
        rank: first rank of the output head.
        n_vocab: vocabulary size.
    """

    def __init__(self, executor: RankExecutor, rank: Rank, n_vocab: int) -> None:
        self._executor, self._rank, self._n_vocab = executor, rank.number, n_vocab
        self._sampler: RowSampler | None = None
        backend = rank.backend
        self._is_possible = backend.captures and backend.samples and captures_tokens()

    def results(
        self, logits: Tensor, ids: Sequence[int], requests: Sequence[SamplingRequest | None]
    ) -> list[int | Logits]:
        """Return each row's next token, or its logits (n_vocab,) if the host samples.

        Args:
            logits: F32 (n, n_vocab) on the rank's device.
            ids: each row's token.
            requests: each row's sampling request; None if the host samples.
        """
        if not self._is_possible or not any(requests):
            return list(logits.cpu().numpy())
        from engine.backends.gpu.decode.sampling import SampledRow

        rows = list[SampledRow]()
        for row, (token, request) in enumerate(zip(ids, requests, strict=True)):
            if request is not None:
                with suppress(EngineError):  # raised again on the host, for this row only
                    mask = request.allowed() if request.allowed else None
                    rows.append(SampledRow(row, token, request.sampler, request.never, mask))
        tokens = self._sampled(logits, rows) if rows else {}
        rest = [row for row in range(len(ids)) if row not in tokens]
        on_host = iter(logits[rest].cpu().numpy() if rest else ())
        return [tokens[row] if row in tokens else next(on_host) for row in range(len(ids))]

    def _sampled(self, logits: Tensor, rows: Sequence[SampledRow]) -> dict[int, int]:
        sampler = self._sampler_for(len(rows))
        if sampler is None:
            return {}
        found = self._executor.call_inline(
            lambda rank: sampler.sample(logits, rows) if rank == self._rank else []
        )
        tokens = zip(rows, found[self._rank], strict=True)
        return {row.row: token for row, token in tokens if token is not None}

    def _sampler_for(self, n: int) -> RowSampler | None:
        if self._sampler is None or self._sampler.n_slot < n:
            from engine.backends.gpu.decode.sampling import RowSampler

            self._sampler = None  # free its memory before allocating more
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
