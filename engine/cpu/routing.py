"""Routing and the weighted sum of experts with the CPU's kernels, for torch tensors."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.cpu.kernels.language.isa import chosen as chosen_isa
from engine.cpu.kernels.language.isa import named
from engine.cpu.kernels.running import jit
from engine.cpu.kernels.running.fastcall import BoundKernel, Kernel, bind_both
from engine.cpu.kernels.small import routing
from engine.cpu.kernels.small.small_ops import f32_bits
from engine.forward.batch import MOST_AT_ONCE
from engine.forward.expert_rows import Groups
from engine.ops.reference import SMALLEST_SUM

if TYPE_CHECKING:
    from engine.cpu.kernels.language.isa import Isa
    from engine.cpu.kernels.running.team import Team
    from engine.forward.operands import Routing

SHORT = 8
"""Largest number of tokens for which a kernel call keeps Python's lock (GIL)."""


@cache
def kernels(name: str) -> dict[str, BoundKernel]:
    """Compile the routing kernels of an instruction set, once per process.

    Args:
        name: name of the instruction set.

    Returns:
        The kernels by name.
    """
    isa = named(name)
    names = (*routing.GATINGS, "sum_of_experts")
    addresses = jit.addresses_by_source("routing", isa, names, routing.build)
    n_arguments = dict.fromkeys(names, len(routing.ASSIGN)) | {"sum_of_experts": len(routing.SUM)}
    return {name: bind_both(addresses[name], n_arguments[name]) for name in names}


class _OrderBuffers(NamedTuple):
    """Memory to which a kernel writes the order of the rows, see `Groups`.

    Attributes:
        n_found: number of experts in use, int64 (1,).
        addresses: addresses of the other three.
    """

    pair_of: Tensor
    row_of: Tensor
    n_found: Tensor
    addresses: tuple[int, ...]

    @classmethod
    def of(cls, n_token: int, n_used: int) -> _OrderBuffers:
        """Allocate memory for the rows of `n_token` tokens with `n_used` experts each."""
        pair_of, row_of, n_found = (
            torch.empty(size, dtype=torch.int64)
            for size in ((n_token * n_used,), (n_token, n_used), (1,))
        )
        addresses = pair_of.data_ptr(), row_of.data_ptr(), n_found.data_ptr()
        return cls(pair_of, row_of, n_found, addresses)


class RoutingOps:
    """Routing operations of one team of threads; see `Ops.assign` and `Ops.sum_of_experts`.

    Scores are within rounding of the reference's; among experts with equal scores, those with lower
    numbers are chosen. A method returns None for tensors that the kernels do not accept.
    """

    def __init__(self, team: Team, isa: Isa | None = None) -> None:
        self._team = team
        self._kernels = kernels((isa or chosen_isa()).name)
        self._for_one_token: dict[int, _OrderBuffers] = {}

    def assign(
        self, rule: Routing, logits: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Groups] | None:
        """Choose each token's experts, see `Ops.assign`."""
        n_token, n_expert = logits.shape
        if n_expert > routing.MAX_EXPERTS or not n_token:
            return None
        if not _is_plain(logits) or (bias is not None and not _is_plain(bias)):
            return None
        n_used = rule.n_used
        weights = torch.empty(n_token, n_used)
        chosen = torch.empty(n_token * n_used, dtype=torch.int64)
        order = self._order_buffers(n_token, n_used)
        expert_of = chosen if n_token == 1 else torch.empty_like(chosen)
        is_whole = n_token <= MOST_AT_ONCE  # so that a recording does not depend on the choice
        shape = min(n_expert, chosen.shape[0]), 3
        table = (torch.zeros if is_whole else torch.empty)(shape, dtype=torch.int64)
        self._kernel(rule.gating, n_token)(
            self._team.address, logits.data_ptr(), n_token, n_expert, n_used,
            0 if bias is None else bias.data_ptr(), int(rule.normalise), f32_bits(rule.scale),
            f32_bits(SMALLEST_SUM), rule.n_group, rule.n_group_used, weights.data_ptr(),
            chosen.data_ptr(), table.data_ptr(), expert_of.data_ptr(), *order.addresses,
        )  # fmt: skip
        if not is_whole:
            table = table[: int(order.n_found)]
        return weights, Groups(table, expert_of, order.pair_of, order.row_of)

    def _order_buffers(self, n_token: int, n_used: int) -> _OrderBuffers:
        """Return memory for the order of the rows.

        It is shared between calls with one token, whose rows always have the same order.
        """
        if n_token > 1:
            return _OrderBuffers.of(n_token, n_used)
        if n_used not in self._for_one_token:
            self._for_one_token[n_used] = _OrderBuffers.of(1, n_used)
        return self._for_one_token[n_used]

    def sum_of_experts(self, y: Tensor, weights: Tensor | None, groups: Groups) -> Tensor | None:
        """Add up each token's rows of y (n_row, n), times weights (T, n_used) if any, to (T, n)."""
        if not _is_plain(y):
            return None
        n_token, n_used = groups.row_of.shape
        out = torch.empty(n_token, y.shape[1])
        self._kernel("sum_of_experts", n_token)(
            self._team.address, y.data_ptr(), 4 * y.shape[1],
            0 if weights is None else weights.data_ptr(), groups.row_of.data_ptr(), n_token,
            n_used, y.shape[1], out.data_ptr(),
        )  # fmt: skip
        return out

    def _kernel(self, name: str, n_token: int) -> Kernel:
        """Return a kernel for `n_token` tokens; wake the team if the kernel releases the GIL."""
        kernel = self._kernels[name]
        if n_token <= SHORT:
            return kernel.with_gil
        self._team.wake()
        return kernel.without_gil


def _is_plain(x: Tensor) -> bool:
    """Return whether the kernels can read a tensor: F32 on the CPU, contiguous."""
    return x.is_cpu and x.dtype == torch.float32 and x.is_contiguous()
