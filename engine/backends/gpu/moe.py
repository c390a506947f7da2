"""Routed experts on the GPU; the host never learns which experts a token is routed to.

The kernels look up each row's expert. Few tokens' rows are multiplied one by one (gemv), so that a
row has the same bits in any batch; many tokens' rows are multiplied in blocks with one expert each,
on tensor cores (grouped GEMM).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from engine.backends.gpu import elementwise
from engine.backends.gpu.elementwise import is_plain, power_of_two
from engine.backends.gpu.kernels import moe as kernels
from engine.backends.gpu.launch.configs import (
    WARP,
    KernelTarget,
    allows,
    config_of,
    refusable,
    target_of,
)
from engine.backends.gpu.launch.graph import refuse_capture
from engine.backends.gpu.launch.kernel_launch import launch
from engine.backends.gpu.matmul.dequant_gemm import f16_row_scale, half_dtype
from engine.backends.gpu.quantised import (
    BLOCKS,
    QuantisedMatrix,
    QuantisedRows,
    allocate_rows,
    constants_of,
    quantise,
)
from engine.errors import Sentence
from engine.formats.quants.layout import BLOCK, n_tiles
from engine.model.forward.attention import most_few_rows
from engine.model.forward.expert_rows import Groups
from engine.model.forward.ops import MIN_SUM

if TYPE_CHECKING:
    from engine.model.forward.operands import Activation, ExpertLayer, Routing

MAX_EXPERTS = 2048  # max. experts that one program compares
MIN_BLOCK = 16  # smallest block of one expert's rows, for many tokens
SORT_STEP = 1024  # pairs that each program of the sort reads per iteration
SUM_STEP = 256  # elements that each program of the sum over experts computes
PLAIN_ROWS, PLAIN_STEP = 4, 512  # matrix rows and columns per step in an unquantised gemv program
HALF_STEP = 1024  # columns that each program rounds to F16 or BF16
UNIT = 16  # common divisor of sizes that lets a thread load several columns together


@dataclass(frozen=True, slots=True)
class DeviceGroups(Groups):
    """Groups of rows by expert, in device memory, with shapes that the host knows in advance.

    For few tokens, rows are (token, expert) pairs in token order, with ascending experts. For many,
    they are in the order of `Groups`.

    Attributes:
        table: int32 (n_block, 3): each block's expert, first row and row count, which is at most
            `block_rows`. Its length is an upper bound; unused entries at the end have 0 rows. Empty
            for few tokens.
        block_rows: maximum number of rows per block; 0 for few tokens.
    """

    block_rows: int

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        raise TypeError("the host does not know which rows experts have")

    @property
    def are_pairs(self) -> bool:
        """Whether rows are pairs in token order."""
        return self.block_rows == 0

    def rows(self, x: Tensor, factors: Tensor | None = None) -> Tensor:
        n_token, n_used = self.row_of.shape
        if not self.are_pairs or n_token == 1:
            return Groups.rows(self, x, factors)
        rows = x[:, None].expand(-1, n_used, -1)
        if factors is not None:
            rows = rows * factors[:, :, None]
        return rows.reshape(self.n_row, -1)

    def weights(self, weights: Tensor) -> Tensor:
        return weights.view(-1, 1) if self.are_pairs else Groups.weights(self, weights)


def assign(
    rule: Routing, logits: Tensor, bias: Tensor | None
) -> tuple[Tensor, DeviceGroups] | None:
    """Compute `Ops.assign`; return None if the kernels do not support the arguments.

    If experts have equal scores, the first are chosen.
    """
    n_expert = rule.n_expert
    if not is_plain(logits) or n_expert > MAX_EXPERTS or not (bias is None or is_plain(bias)):
        return None
    n_token, n_used = logits.shape[0], rule.n_used
    is_few = n_token <= most_few_rows()
    if not allows(logits.device, "assign", int(is_few)):
        return None
    weights = logits.new_empty(n_token, n_used)
    chosen = _numbers(n_token * n_used, logits, torch.int64 if is_few else torch.int32)
    pair_of = _numbers(n_token * n_used, logits)
    has_groups = rule.n_group > 1 and rule.gating != "softmax_chosen"
    n_group = rule.n_group if has_groups else 1
    launch(
        kernels.assign, (n_token,),
        logits, logits if bias is None else bias, weights, chosen, pair_of, rule.scale,
        MIN_SUM, num_warps=1, N_EXPERT=n_expert, N_USED=n_used, N_GROUP=n_group,
        N_GROUP_USED=rule.n_group_used, GROUPS=power_of_two(n_group),
        MEMBERS=power_of_two(n_expert // n_group), GATING=rule.gating,
        HAS_BIAS=bias is not None, NORMALISES=rule.normalise, IN_PAIRS=is_few,
    )  # fmt: skip
    if is_few:
        table, row_of = _numbers(0, logits, torch.int32).view(0, 3), pair_of.view(n_token, n_used)
        return weights, DeviceGroups(table, chosen, pair_of, row_of, 0)
    return weights, sorted_groups(chosen.view(n_token, n_used), n_expert)


def sorted_groups(chosen: Tensor, n_expert: int) -> DeviceGroups:
    """Sort many tokens' pairs by expert; `chosen`, int32 (T, n_used), ascends within each token."""
    n_pair = chosen.numel()
    wanted = max(power_of_two(-(-n_pair // n_expert)), MIN_BLOCK)
    block_rows = min(wanted, most_block_rows(target_of(chosen.device)))
    n_block = n_pair // block_rows + min(n_expert, n_pair)
    table = _numbers(n_block * 3, chosen, torch.int32).view(n_block, 3)
    expert_of, pair_of, row_of = (_numbers(n_pair, chosen) for _ in range(3))
    launch(
        kernels.sort, (n_expert,),
        chosen, n_pair, expert_of, pair_of, row_of, table, n_block, N_EXPERT=n_expert,
        SIZE=power_of_two(n_expert + 1), STEP=SORT_STEP, BLOCK_ROWS=block_rows,
    )  # fmt: skip
    return DeviceGroups(table, expert_of, pair_of, row_of.view(chosen.shape), block_rows)


def most_block_rows(target: KernelTarget) -> int:
    """Return the maximum number of an expert's rows per program; more means less decoding."""
    if target.maker == "nvidia" and target.capability < 80:
        return MIN_BLOCK
    return 128 if target.maker == "nvidia" and 90 <= target.capability < 120 else 64


@refusable
def sum_of_experts(y: Tensor, weights: Tensor | None, groups: Groups) -> Tensor | None:
    """Compute `Ops.sum_of_experts`; return None if the kernel does not support the arguments."""
    if not is_plain(y) or not (weights is None or is_plain(weights)):
        return None
    (n_token, n_used), n = groups.row_of.shape, y.shape[1]
    out = y.new_empty(n_token, n)
    size = min(SUM_STEP, power_of_two(n))
    launch(
        kernels.sum_of_experts, (n_token, -(-n // size)),
        y, y if weights is None else weights, groups.row_of, out, n,
        N_USED=n_used, HAS_WEIGHTS=weights is not None, SIZE=size,
    )  # fmt: skip
    return out


def _numbers(n: int, like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(n, dtype=dtype, device=like.device)


class ExpertMatrices(NamedTuple):
    """One matrix per expert, with a scale and a bias for its products; see `ExpertLayer`.

    Attributes:
        planes: uint8 (n_expert, n_tile, tile_bytes), or None.
        data: F16, BF16 or F32 (n_expert, n_rows, n_columns); None if in planes.
        scale: factors on the products, F32 (n_expert,), or None.
        bias: F32 (n_expert, n_rows), or None.
    """

    planes: QuantisedMatrix | None
    data: Tensor | None
    scale: Tensor | None = None
    bias: Tensor | None = None

    @classmethod
    def of(
        cls, weight: object, scale: Tensor | None = None, bias: Tensor | None = None
    ) -> ExpertMatrices | None:
        """Return a weight's matrices; None if the kernels cannot read them."""
        held = getattr(weight, "planes", getattr(weight, "data", None))
        if not isinstance(held, Tensor) or held.dim() != 3 or not held.is_contiguous():
            return None
        if hasattr(weight, "planes"):
            return cls(cast(QuantisedMatrix, weight), None, scale, bias)
        return cls(None, held, scale, bias)

    @property
    def held(self) -> Tensor:
        """The tensor that the kernels read."""
        if self.planes is not None:
            return self.planes.planes
        assert self.data is not None, "weights are in planes or plain"
        return self.data

    @property
    def n_rows(self) -> int:
        return self.held.shape[1] if self.planes is None else self.planes.n_rows

    @property
    def type_name(self) -> str | int:
        """GGML type number of the planes, or the elements' torch type."""
        return str(self.held.dtype) if self.planes is None else self.planes.type_number

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that matrices must share to be multiplied in one launch: type, layout and sizes."""
        layout: tuple[object, ...] = (self.held.dtype,)
        if self.planes is not None:
            layout = (self.planes.type_number, self.planes.extent, self.planes.x_bytes)
        return *layout, self.held.shape, self.n_rows, self.scale is None, self.bias is None


class ExpertInput(NamedTuple):
    """Rows to multiply, and their experts.

    Attributes:
        x: contiguous F32.
        per_row: number of group rows per row of x, for example one for each of a token's experts; 0
            if x has a row for each row in the groups.
    """

    x: Tensor
    groups: DeviceGroups
    per_row: int


def grouped(weight: object, x: Tensor, groups: Groups) -> Tensor | None:
    """Compute `engine.model.forward.ops.Weight.grouped`; return None if no kernel supports it."""
    matrix = ExpertMatrices.of(weight)
    if matrix is None or not isinstance(groups, DeviceGroups) or x.dtype != torch.float32:
        return None
    if not _may_multiply([matrix], groups):
        return None
    per_row = 0
    if groups.are_pairs and x.stride(0) == 0:  # one token, expanded for all its experts
        x, per_row = x[:1], groups.n_row
    return products([matrix], ExpertInput(x.contiguous(), groups, per_row))[0]


def ffn(
    act: Activation, x: Tensor, gate: ExpertLayer | None, up: ExpertLayer | None, down: ExpertLayer,
    groups: Groups, factors: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Compute `Ops.experts`; return None if no kernel supports it."""
    layers = [layer for layer in (gate, up, down) if layer is not None]
    found = [ExpertMatrices.of(layer.weight, layer.scale, layer.bias) for layer in layers]
    matrices = [matrix for matrix in found if matrix is not None]
    if len(matrices) < len(layers) or not isinstance(groups, DeviceGroups):
        return None
    if not _may_multiply(matrices, groups):
        return None
    *first, last = matrices
    per_row = groups.row_of.shape[1]
    if factors is not None:
        x, per_row = groups.rows(x, factors), 0
    inner = list(products(first, ExpertInput(x.contiguous(), groups, per_row)))
    if gate is not None and up is None:
        inner = list(inner[0].chunk(2, dim=-1))
    if groups.are_pairs and last.planes is not None:
        rows = _quantised_inner(act, inner, last.planes)
        return _planes_gemv([last], last.planes, rows, groups, 0)[0]
    y = elementwise.activate(act, inner[0]) if gate is None else elementwise.gated(act, *inner)
    return None if y is None else products([last], ExpertInput(y, groups, 0))[0]


def by_expert(groups: Groups) -> Iterator[tuple[int, slice]]:
    """Yield experts with their rows, for multiplying one expert after another.

    This reads the groups back from the device, so the token cannot be captured.
    """
    if not isinstance(groups, DeviceGroups):
        yield from groups
        return
    refuse_capture(Sentence("experts are computed one by one"))
    first = 0
    for expert, same in groupby(groups.expert_of.tolist()):
        stop = first + len(list(same))
        yield expert, slice(first, stop)
        first = stop


def _may_multiply(matrices: Sequence[ExpertMatrices], groups: DeviceGroups) -> bool:
    kernel = "expert_gemv" if groups.are_pairs else "expert_gemm"
    return all(allows(m.held.device, kernel, m.type_name) for m in matrices)


def products(matrices: Sequence[ExpertMatrices], given: ExpertInput) -> Tensor:
    """Return `x Wᵀ * scale + bias` for up to two matrices, F32 (matrices, n_row, n_rows)."""
    if len({matrix.kind for matrix in matrices}) > 1:
        return torch.cat([products([matrix], given) for matrix in matrices])
    if not given.groups.are_pairs:
        return _grouped_gemm(matrices, given)
    weight = matrices[0].planes
    if weight is None:
        return _plain_gemv(matrices, given)
    rows = quantise(given.x, weight.extent, weight.x_bytes)
    return _planes_gemv(matrices, weight, rows, given.groups, given.per_row)


def _planes_gemv(
    matrices: Sequence[ExpertMatrices], weight: QuantisedMatrix, rows: QuantisedRows,
    groups: DeviceGroups, per_row: int,
) -> Tensor:  # fmt: skip
    n_blocks, n_tile = weight.extent.n_blocks, n_tiles(weight.n_rows)
    target = target_of(rows.numbers.device)
    config = config_of(target, "expert_rows", n_blocks=n_blocks)
    out = rows.facts.new_empty(len(matrices), groups.n_row, weight.n_rows, dtype=torch.float32)
    launch(
        kernels.planes_rows, (n_tile, groups.n_row, len(matrices)),
        *_operands(matrices, out), out, groups.expert_of, rows.numbers, rows.facts, n_tile,
        weight.n_rows, max(1, per_row), weight.planes.shape[-1], n_blocks, weight.extent.skip,
        num_warps=config["num_warps"], ITEMS=config["num_warps"] * WARP, UNROLL=config["unroll"],
        X_BYTES=rows.x_bytes, ASM=target.has_asm, **_epilogue_constants(matrices[0]),
        **constants_of(weight.type_number),
    )  # fmt: skip
    return out


def _plain_gemv(matrices: Sequence[ExpertMatrices], given: ExpertInput) -> Tensor:
    x, groups, per_row = given
    n_rows, n_columns = matrices[0].n_rows, x.shape[1]
    unit = _common_unit(n_columns)
    out = x.new_empty(len(matrices), groups.n_row, n_rows)
    launch(
        kernels.plain_rows, (-(-n_rows // PLAIN_ROWS), groups.n_row, len(matrices)),
        *_operands(matrices, out), out, groups.expert_of, x, n_rows, n_columns // unit,
        max(1, per_row), ROWS=PLAIN_ROWS, STEP=min(PLAIN_STEP, elementwise.power_of_two(n_columns)),
        UNIT=unit, **_epilogue_constants(matrices[0]),
    )  # fmt: skip
    return out


def _quantised_inner(
    act: Activation, found: Sequence[Tensor], weight: QuantisedMatrix
) -> QuantisedRows:
    """Return `act(gate) * up`, or `act(gate)` if there is no up, quantised for the last matrix."""
    first, second, extent = found[0], found[-1], weight.extent
    x_bytes = 0 if target_of(first.device).gemv_operands == "f32" else weight.x_bytes
    counters = _numbers(0, first, torch.int32)  # empty, since no tile is shared
    rows = allocate_rows(first.shape[0], extent, x_bytes, counters)
    launch(
        kernels.quantise_inner, (rows.n_row, -(-extent.n_blocks // BLOCKS)),
        first, second, first.stride(0), extent.lead, extent.n_columns, extent.n_blocks, act.limit,
        *rows.typed, X_BYTES=x_bytes, KIND=act.kind, HAS_UP=len(found) > 1,
        HAS_LIMIT=act.limit != 0, BLOCKS=BLOCKS,
    )  # fmt: skip
    return rows


def _grouped_gemm(matrices: Sequence[ExpertMatrices], given: ExpertInput) -> Tensor:
    groups, weight, n_rows = given.groups, matrices[0].planes, matrices[0].n_rows
    target = target_of(given.x.device)
    x, x_scale = _to_half(given.x, matrices[0])
    out = given.x.new_empty(len(matrices), groups.n_row, n_rows)
    args: list[Tensor | int] = [
        *_operands(matrices, out), out, groups.table, groups.pair_of, x,
        x if x_scale is None else x_scale, groups.n_row, n_rows,
    ]  # fmt: skip
    constants = {
        "HAS_X_SCALE": x_scale is not None,
        "ROWS": groups.block_rows,
        "N_USED": given.per_row,
        "IS_INTERPRETED": target.is_interpreted,
        **_epilogue_constants(matrices[0]),
    }
    config = config_of(target, "expert_blocks", rows=groups.block_rows)
    columns, num_stages = config["columns"], config["num_stages"]
    grid = (-(-n_rows // columns), groups.table.shape[0], len(matrices))
    if weight is not None:
        launch(
            kernels.planes_product, grid,
            *args, weight.planes.shape[-1], n_tiles(n_rows), weight.extent.n_blocks,
            weight.extent.skip, num_warps=config["num_warps"], num_stages=num_stages,
            COLUMNS=columns, BLOCKS=config["blocks"], **constants,
            **constants_of(weight.type_number),
        )  # fmt: skip
    else:
        unit = _common_unit(given.x.shape[1])
        step = 16 if x.dtype == torch.float32 else config["blocks"] * BLOCK
        launch(
            kernels.plain_product, grid,
            *args, given.x.shape[1] // unit, num_warps=config["num_warps"], num_stages=num_stages,
            COLUMNS=columns, STEP=step, UNIT=unit,
            PRECISION=target.dot_precision, **constants,
        )  # fmt: skip
    return out


def _to_half(x: Tensor, matrix: ExpertMatrices) -> tuple[Tensor, Tensor | None]:
    """Return rows in the type that tensor cores multiply, and factors to apply to the products."""
    half = half_dtype(x.device)
    if matrix.planes is not None:
        extent = matrix.planes.extent
        dtype, lead, width = half, extent.lead, extent.n_blocks * BLOCK
    else:
        dtype, lead, width = matrix.held.dtype, 0, x.shape[1]
        if dtype == torch.bfloat16 != half:
            dtype = torch.float32
    if dtype == torch.float32:
        return x, None
    scale = f16_row_scale(x) if dtype == torch.float16 else None
    out = torch.empty(x.shape[0], width, dtype=dtype, device=x.device)
    size = min(HALF_STEP, elementwise.power_of_two(width))
    unit = _common_unit(lead, x.shape[1], width)
    launch(
        kernels.shorten, (x.shape[0], -(-width // size)),
        x, x if scale is None else scale, out, *(n // unit for n in (lead, x.shape[1], width)),
        HAS_SCALE=scale is not None, UNIT=unit, SIZE=size,
    )  # fmt: skip
    return out, scale


def _common_unit(*sizes: int) -> int:
    """Return a common divisor of all sizes, for which kernels are compiled."""
    return UNIT if all(size % UNIT == 0 for size in sizes) else 1


def _operands(matrices: Sequence[ExpertMatrices], other: Tensor) -> list[Tensor]:
    """Return two matrices, scales and biases for the kernels; `other` replaces missing ones."""
    pair = (matrices[0], matrices[-1])
    scales = [other if m.scale is None else m.scale for m in pair]
    return [*(m.held for m in pair), *scales, *(other if m.bias is None else m.bias for m in pair)]


def _epilogue_constants(matrix: ExpertMatrices) -> Mapping[str, Any]:
    return {"HAS_SCALE": matrix.scale is not None, "HAS_BIAS": matrix.bias is not None}
