"""CPU kernels on torch tensors: routing, fused expert FFNs for prompts, sums of experts."""

from __future__ import annotations

from array import array
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.backends.cpu.kernels.language.isa import chosen as chosen_isa
from engine.backends.cpu.kernels.language.isa import named
from engine.backends.cpu.kernels.products.experts import LOCK_BYTES, place_bytes
from engine.backends.cpu.kernels.running import compiled, jit
from engine.backends.cpu.kernels.running.fastcall import BoundKernel, Kernel, bind_both
from engine.backends.cpu.kernels.running.result_memory import result
from engine.backends.cpu.kernels.small import routing
from engine.backends.cpu.kernels.small.small_ops import f32_bits, is_plain
from engine.backends.cpu.weights import PlaneWeight
from engine.model.forward.batch import MAX_AT_ONCE
from engine.model.forward.expert_rows import Groups
from engine.model.forward.ops import MIN_SUM

if TYPE_CHECKING:
    from engine.backends.cpu.kernels.language.isa import Isa
    from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
    from engine.model.forward.operands import Routing, Weight

SHORT = 8
"""Calls with at most this many tokens keep the GIL."""

MAX_ROWS = 64
"""Maximum rows per expert in a piece. Their intermediate results, some 15 KB per row for 2048 and
768 columns, fit in L2."""

MIN_EXPERTS = 8
"""Minimum number of experts per thread for the fused FFN; fewer would be distributed unevenly."""


@cache
def kernels(name: str) -> dict[str, BoundKernel]:
    """Compile the routing kernels for an instruction set, given its name; return them by name."""
    isa = named(name)
    names = (*routing.GATINGS, "sum_of_experts")
    addresses = jit.addresses_by_source("routing", isa, names, routing.build)
    n_arguments = dict.fromkeys(names, len(routing.ASSIGN)) | {"sum_of_experts": len(routing.SUM)}
    return {name: bind_both(addresses[name], n_arguments[name]) for name in names}


class _OrderBuffers(NamedTuple):
    """Memory for the order of the rows (see `Groups`) and for the number of experts in use."""

    pair_of: Tensor
    row_of: Tensor
    n_found: Tensor
    addresses: tuple[int, ...]

    @classmethod
    def of(cls, n_token: int, n_used: int) -> _OrderBuffers:
        pair_of, row_of, n_found = (
            torch.empty(size, dtype=torch.int64)
            for size in ((n_token * n_used,), (n_token, n_used), (1,))
        )
        addresses = pair_of.data_ptr(), row_of.data_ptr(), n_found.data_ptr()
        return cls(pair_of, row_of, n_found, addresses)


class RoutingOps:
    """Routing operations on one thread pool; see `Ops.assign` and `Ops.sum_of_experts`.

    Scores differ from the reference only by rounding. Among experts with equal scores, those with
    lower indices are chosen. Methods return None for unsupported tensors.
    """

    def __init__(self, pool: ThreadPool, isa: Isa | None = None) -> None:
        self._pool = pool
        self._kernels = kernels((isa or chosen_isa()).name)
        self._for_one_token: dict[int, _OrderBuffers] = {}

    def assign(
        self, rule: Routing, logits: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Groups] | None:
        """Choose each token's experts; see `Ops.assign`."""
        n_token, n_expert = logits.shape
        if n_expert > routing.MAX_EXPERTS or not n_token:
            return None
        if not is_plain(logits) or (bias is not None and not is_plain(bias)):
            return None
        n_used = rule.n_used
        weights = torch.empty(n_token, n_used)
        chosen = torch.empty(n_token * n_used, dtype=torch.int64)
        order = self._order_buffers(n_token, n_used)
        expert_of = chosen if n_token == 1 else torch.empty_like(chosen)
        is_whole = n_token <= MAX_AT_ONCE  # so that recordings do not depend on the choice
        shape = min(n_expert, chosen.shape[0]), 3
        table = (torch.zeros if is_whole else torch.empty)(shape, dtype=torch.int64)
        self._kernel(rule.gating, n_token)(
            self._pool.address, logits.data_ptr(), n_token, n_expert, n_used,
            0 if bias is None else bias.data_ptr(), int(rule.normalise), f32_bits(rule.scale),
            f32_bits(MIN_SUM), rule.n_group, rule.n_group_used, weights.data_ptr(),
            chosen.data_ptr(), table.data_ptr(), expert_of.data_ptr(), *order.addresses,
        )  # fmt: skip
        if not is_whole:
            table = table[: int(order.n_found)]
        return weights, Groups(table, expert_of, order.pair_of, order.row_of)

    def _order_buffers(self, n_token: int, n_used: int) -> _OrderBuffers:
        """Return memory for the order of the rows, which calls with one token share."""
        if n_token > 1:
            return _OrderBuffers.of(n_token, n_used)
        if n_used not in self._for_one_token:
            self._for_one_token[n_used] = _OrderBuffers.of(1, n_used)
        return self._for_one_token[n_used]

    def sum_of_experts(self, y: Tensor, weights: Tensor | None, groups: Groups) -> Tensor | None:
        """Return the sum of each token's rows in y (n_row, n), times weights (T, n_used) if any."""
        if not is_plain(y):
            return None
        n_token, n_used = groups.row_of.shape
        out = torch.empty(n_token, y.shape[1])
        self._kernel("sum_of_experts", n_token)(
            self._pool.address, y.data_ptr(), 4 * y.shape[1],
            0 if weights is None else weights.data_ptr(), groups.row_of.data_ptr(), n_token,
            n_used, y.shape[1], out.data_ptr(),
        )  # fmt: skip
        return out

    def _kernel(self, name: str, n_token: int) -> Kernel:
        return self._kernels[name].chosen(self._pool, is_short=n_token <= SHORT)


class ExpertFFN:
    """A layer's expert FFNs `down(act(gate(x)) * up(x))`, for prompts.

    Args:
        gate, up, down: matrices on one rank; see `of`.
    """

    def __init__(self, gate: PlaneWeight, up: PlaneWeight, down: PlaneWeight) -> None:
        self._gate, self._down, self._worker = gate, down, gate.worker
        products = gate.expert_product, up.expert_product, down.expert_product
        self._products = array("q", [number for product in products for number in product])
        self._kept = gate.planes, up.planes, down.planes
        n_blocks = gate.extent.n_blocks, down.extent.n_blocks
        self._place_bytes = place_bytes(MAX_ROWS, n_blocks, gate.n_rows, gate.x_bytes)
        self._locks = array("q", bytes(LOCK_BYTES * gate.worker.n_threads))

    @classmethod
    def of(cls, *weights: Weight | None) -> ExpertFFN | None:
        """Return the FFNs with matrices gate, up and down; None if unsupported.

        All must be in planes, gate and up with the same columns, down with whole blocks of columns.
        """
        planes = [weight for weight in weights if isinstance(weight, PlaneWeight)]
        if len(planes) < len(weights):
            return None
        gate, up, down = planes
        can = (
            all(weight.rows is gate.worker.rows for weight in planes)
            and gate.extent == up.extent
            and gate.n_rows == up.n_rows == down.extent.n_columns
            and down.extent.is_exact
        )
        return cls(gate, up, down) if can else None

    def is_fast(self, groups: Groups) -> bool:
        """Return whether this is faster than separate products."""
        is_long = groups.row_of.shape[0] > MAX_AT_ONCE  # as recordings would not keep its memory
        return is_long and len(groups.table) >= MIN_EXPERTS * self._worker.n_threads

    def __call__(self, x: Tensor, groups: Groups, activation: int, limit: int) -> Tensor:
        """Return each row's result, (n_row, n_out), for tokens x (T, n_in).

        Args:
            activation: address of a kernel in `engine.backends.cpu.kernels.small.activation`.
            limit: the activation's limit, as F32 bits.
        """
        worker, n_threads = self._worker, self._worker.n_threads
        tokens = worker.tokens.panels(x, self._gate.extent)
        y = result(groups.n_row, self._down.n_rows)
        places = worker.bytes_scratch(n_threads * self._place_bytes)
        worker.pool.wake()
        compiled.feed_experts(worker.x_bytes)(
            worker.pool.address, tokens, groups.pair_of.data_ptr(), groups.row_of.shape[1],
            self._products.buffer_info()[0], activation, limit, groups.table.data_ptr(),
            len(groups.table), MAX_ROWS, places, self._place_bytes,
            self._locks.buffer_info()[0], n_threads, y.data_ptr(),
        )  # fmt: skip
        return y
