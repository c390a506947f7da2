"""Rows of tokens grouped by routed expert, for grouped GEMMs over all experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.forward.recording import refuse_replay


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs of a token and one of its experts, as rows that are grouped by expert.

    Rows are in ascending order of experts, and of tokens within an expert. Every token has the same
    number of distinct experts.

    Attributes:
        table: index, first row and row count of each expert in use, int64 (n_group, 3), on the CPU;
            entries at the end may have no rows.
        expert_of: expert of each row, int64 (n_row,).
        pair_of: pair of each row, int64 (n_row,); pairs are numbered token by token.
        row_of: row of each pair, int64 (n_token, n_used).
    """

    table: Tensor
    expert_of: Tensor
    pair_of: Tensor
    row_of: Tensor

    @classmethod
    def of(cls, chosen: Tensor) -> Groups:
        """Group the rows by expert, given each token's experts, ascending, int64 (n_token,
        n_used)."""
        refuse_replay("experts are grouped in Python")
        if chosen.shape[0] == 1:
            rows = torch.arange(chosen.shape[1], device=chosen.device)
            numbers = [(expert, row, 1) for row, expert in enumerate(chosen[0].tolist())]
            return cls(torch.tensor(numbers), chosen[0], rows, rows[None])
        expert_of, pair_of = chosen.view(-1).sort(stable=True)
        numbers, first = [], 0
        for expert, n in enumerate(expert_of.bincount().tolist()):
            if n:
                numbers.append((expert, first, n))
            first += n
        row_of = pair_of.argsort().view(chosen.shape)
        return cls(torch.tensor(numbers), expert_of, pair_of, row_of)

    @property
    def n_row(self) -> int:
        """Number of rows over all experts."""
        return self.expert_of.shape[0]

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Yield each expert in use with its rows."""
        refuse_replay("experts are computed one by one")
        for expert, first, n in self.table.tolist():
            if n:
                yield expert, slice(first, first + n)

    def rows(self, x: Tensor, factors: Tensor | None = None) -> Tensor:
        """Return each row's token from x (n_token, n), as (n_row, n); do not write to the result.

        `factors` scale each pair's row, (n_token, n_used).
        """
        n_token, n_used = self.row_of.shape
        rows = x.expand(n_used, -1) if n_token == 1 else x.index_select(0, self.pair_of // n_used)
        return rows if factors is None else rows * self.weights(factors)

    def weights(self, weights: Tensor) -> Tensor:
        """Return the weight of each row's pair from weights (n_token, n_used), as (n_row, 1)."""
        return weights.view(-1, 1).index_select(0, self.pair_of)

    def sum(self, y: Tensor) -> Tensor:
        """Add up each token's rows of y (n_row, n) in ascending order of experts; (n_token, n)."""
        first, *others = self.row_of.unbind(1)
        total = y.index_select(0, first)
        for rows in others:
            total += y.index_select(0, rows)
        return total
