"""Routing and the sum of experts by the CPU's kernels, for torch tensors."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.kernels import jit, routing
from engine.kernels.fastcall import Kernel
from engine.kernels.isa import chosen, supported
from engine.kernels.steps import Calls, bits, calls
from engine.ops.experts import Groups
from engine.ops.reference import SMALLEST_SUM

if TYPE_CHECKING:
    from engine.kernels.isa import Isa
    from engine.kernels.team import Team
    from engine.layers.moe import Routing

SHORT = 8
"""Tokens up to which a call keeps Python's lock."""


@cache
def kernels(name: str) -> dict[str, Calls]:
    """Compile them, once for a kind of processor."""
    isa = next(kind for kind in supported() if kind.name == name)
    names = (*routing.GATINGS, "sum_of_experts")
    found = jit.addresses("routing", isa, names, routing.build)
    n_arguments = dict.fromkeys(names, len(routing.ASSIGN)) | {"sum_of_experts": len(routing.SUM)}
    return {name: calls(found[name], n_arguments[name]) for name in names}


class RoutingSteps:
    """The kernels, run by one team; see `ReferenceOps.assign` and `sum_of_experts`.

    Scores are within rounding of the reference's; of experts that a token likes equally, the first
    ones count. A method answers None where it does not serve.
    """

    def __init__(self, team: Team, isa: Isa | None = None) -> None:
        self._team = team
        self._kernels = kernels((isa or chosen()).name)

    def assign(
        self, rule: Routing, logits: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Groups] | None:
        """Weights (T, n_used) in the order of experts, and the rows of these."""
        n_token, n_expert = logits.shape
        if n_expert > routing.MAX_EXPERTS or not n_token:
            return None
        if not _is_plain(logits) or (bias is not None and not _is_plain(bias)):
            return None
        n_used, n_row = rule.n_used, n_token * rule.n_used
        n_most = min(n_expert, n_row)
        weights = torch.empty(n_token, n_used)
        memory = torch.empty(4 * n_row + 3 * n_most + 1, dtype=torch.int64)
        place = memory.data_ptr()
        chosen, expert_of, pair_of, row_of, table = (place + 8 * n_row * n for n in range(5))
        run = self._run(rule.gating, n_token)
        run(
            self._team.address, logits.data_ptr(), n_token, n_expert, n_used,
            0 if bias is None else bias.data_ptr(), int(rule.normalise), bits(rule.scale),
            bits(SMALLEST_SUM), rule.n_group, rule.n_group_used, weights.data_ptr(), chosen, table,
            expert_of, pair_of, row_of, table + 24 * n_most,
        )  # fmt: skip
        sizes = [n_row, n_row, n_row, n_row, 3 * n_most, 1]
        _, experts, pairs, rows, found, n_found = torch.split(memory, sizes)
        n_group = n_used if n_token == 1 else int(n_found)
        found = found.view(n_most, 3)[:n_group]
        return weights, Groups(found, experts, pairs, rows.view(n_token, n_used))

    def sum_of_experts(self, y: Tensor, weights: Tensor | None, groups: Groups) -> Tensor | None:
        """Each token's rows of y (n_row, n), times weights (T, n_used) if any, added up."""
        if not _is_plain(y):
            return None
        n_token, n_used = groups.row_of.shape
        out = torch.empty(n_token, y.shape[1])
        self._run("sum_of_experts", n_token)(
            self._team.address, y.data_ptr(), 4 * y.shape[1],
            0 if weights is None else weights.data_ptr(), groups.row_of.data_ptr(), n_token,
            n_used, y.shape[1], out.data_ptr(),
        )  # fmt: skip
        return out

    def _run(self, name: str, n_token: int) -> Kernel:
        found = self._kernels[name]
        if n_token <= SHORT:
            return found.short
        self._team.wake()
        return found.long


def _is_plain(x: Tensor) -> bool:
    """Whether the kernels can read it: F32 on the CPU, without gaps."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous()
