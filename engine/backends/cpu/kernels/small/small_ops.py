"""Small operations on torch tensors: norms, activations, RoPE, add and multiply.

Kernels support F32 tensors on the CPU that have contiguous rows. For other tensors, methods return
None, and the caller uses torch. Most calls take a few microseconds, so they keep the GIL, and
checks are kept to a minimum.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from math import inf

import torch
from torch import Tensor

from engine.backends.cpu.kernels.language.isa import Isa, chosen, named
from engine.backends.cpu.kernels.running import jit
from engine.backends.cpu.kernels.running.fastcall import BoundKernel, Kernel, bind_both
from engine.backends.cpu.kernels.running.result_memory import MIN_RESULT_BYTES, result
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.backends.cpu.kernels.small import activation, functions, norm, rope

F32 = torch.float32

SHORT_CALL = 1 << 16
"""Calls with at most this many elements keep the GIL."""


@dataclass(frozen=True, slots=True)
class SmallKernels:
    """The kernels compiled for one instruction set, by name.

    Attributes:
        norms: RMSNorm and LayerNorm.
        sums_and_norms: norms of the sum of two tensors.
        activations: activations, gated or not.
        ropes: RoPE, by style.
        pairwise: element-wise sum and product.
        functions: softplus and other functions with parameters.
    """

    norms: dict[str, BoundKernel]
    sums_and_norms: dict[str, BoundKernel]
    activations: dict[str, BoundKernel]
    ropes: dict[str, BoundKernel]
    pairwise: dict[str, BoundKernel]
    functions: dict[str, BoundKernel]


@cache
def kernels(name: str) -> SmallKernels:
    """Compile the small kernels for an instruction set, given its name."""
    isa = named(name)
    found = []
    for group, names, arguments, build in (
        ("norm", norm.NAMES, norm.ARGUMENTS, norm.build),
        ("add-norm", norm.SUM_NAMES, norm.SUM_ARGUMENTS, norm.build_sums),
        ("activation", activation.KINDS, activation.ARGUMENTS, activation.build),
        ("rope", rope.STYLES, rope.ARGUMENTS, rope.build),
        ("elementwise", functions.PAIRWISE, functions.PAIRWISE_ARGUMENTS, functions.build_pairwise),
        ("functions", functions.NAMES, functions.ARGUMENTS, functions.build),
    ):
        at = jit.addresses_by_source(group, isa, names, build)
        found.append({name: bind_both(at[name], len(arguments)) for name in names})
    return SmallKernels(*found)


@cache
def f32_bits(number: float) -> int:
    """Return a number's bits as F32."""
    return int.from_bytes(struct.pack("<f", number), "little")


@cache
def _limit(kind: str, limit: float) -> int:
    """Return an activation's limit as bits; 0 means no limit and becomes infinity."""
    return f32_bits(limit if limit or kind == "oai" else inf)


class SmallOps:
    """The small operations, computed by one pool.

    Args:
        pool: threads that compute.
        isa: instruction set of the kernels; None for the best that this processor supports.
    """

    def __init__(self, pool: ThreadPool, isa: Isa | None = None) -> None:
        self._pool = pool
        self._address = pool.address
        self.isa = isa or chosen()
        found = kernels(self.isa.name)
        self._rms, self._layer = found.norms["rms_norm"], found.norms["layer_norm"]
        self._sums_and_norms = found.sums_and_norms
        self._activations = found.activations
        self._ropes = found.ropes
        self._pairwise = found.pairwise
        self._functions = found.functions

    def rms_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor | None:
        """Compute `Ops.rms_norm` for x (..., n)."""
        return self._norm(self._rms, x, weight, bias, eps)

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor | None:
        """Compute `Ops.layer_norm` for x (..., n)."""
        return self._norm(self._layer, x, weight, bias, eps)

    def _norm(
        self, kernel: BoundKernel, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor | None:
        rows = row_layout(x)
        places = rows and _weights(weight, bias, rows)
        if rows is None or places is None:
            return None
        out = _empty(x)
        run = self._binding(kernel, out)
        run(self._address, x.data_ptr(), *rows, *places, f32_bits(eps), out.data_ptr())
        return out

    def add_norm(
        self, kind: str, x: Tensor, delta: Tensor, weight: Tensor | None, bias: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Return x + delta, both (T, n), and the sum's norm; see `NormLayer.kind` for `kind`."""
        rows, others = row_layout(x), row_layout(delta)
        if rows is None or others is None or x.dim() != 2 or x.shape != delta.shape:
            return None
        places = _weights(weight, bias, rows)
        if places is None:
            return None
        total, out = _empty(x), _empty(x)
        self._binding(self._sums_and_norms[f"add_{kind}_norm"], out)(
            self._address, x.data_ptr(), rows[0], delta.data_ptr(), others[0], *x.shape,
            *places[:2], f32_bits(eps), total.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return total, out

    def activation(self, kind: str, limit: float) -> tuple[int, int] | None:
        """Return an activation kernel's address and its argument `limit`."""
        kernel = self._activations.get(kind)
        return kernel and (kernel.address, _limit(kind, limit))

    def gated(
        self, kind: str, limit: float, gate: Tensor, up: Tensor | None, *, in_place: bool = False
    ) -> Tensor | None:
        """Compute `Ops.gated`, or `activate` if up is None; gate and up must have the same shape.

        Args:
            in_place: whether the result may overwrite gate.
        """
        kernel = self._activations.get(kind)
        if kernel is None or (up is not None and up.shape != gate.shape):
            return None
        if not _is_f32(gate) or (up is not None and not _is_f32(up)):
            return None
        n_rows, n = 1, gate.numel()
        strides = [0, 0]
        if not gate.is_contiguous() or (up is not None and not up.is_contiguous()):
            cut = [row_layout(x) for x in (gate, up) if x is not None]
            if gate.dim() == 2 and None not in cut:
                n_rows, n = gate.shape
                strides = [rows[0] for rows in cut if rows is not None]
            else:
                gate, up = gate.contiguous(), None if up is None else up.contiguous()
        out = gate if in_place and gate.is_contiguous() else _empty(gate)
        self._binding(kernel, out)(
            self._address, gate.data_ptr(), strides[0], 0 if up is None else up.data_ptr(),
            strides[-1], n_rows, n, _limit(kind, limit), out.data_ptr(),
        )  # fmt: skip
        return out

    def function(self, name: str, x: Tensor, *parameters: float) -> Tensor | None:
        """Compute a function from `kernels.small.functions` for x of any shape."""
        if not _is_f32(x):
            return None
        x = x.contiguous()
        out = _empty(x)
        bits = [f32_bits(number) for number in parameters]
        bits += [0] * (len(functions.PARAMETERS) - len(bits))
        run = self._binding(self._functions[name], out)
        run(self._address, x.data_ptr(), x.numel(), *bits, out.data_ptr())
        return out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor | None:
        """Apply RoPE to x (T, n_head, head_dim), with cos and sin (T, 1, n_rot / 2)."""
        rows = row_layout(x)
        if rows is None or x.dim() != 3 or not is_plain(cos) or not is_plain(sin):
            return None
        shape = cos.shape
        n_pairs = shape[-1]
        if shape != (rows[2], 1, n_pairs) or shape != sin.shape or 2 * n_pairs > rows[4]:
            return None
        out = _empty(x)
        run = self._binding(self._ropes[style], out)
        places = cos.data_ptr(), sin.data_ptr(), out.data_ptr()
        run(self._address, x.data_ptr(), *rows, n_pairs, *places)
        return out

    def pairwise(self, name: str, x: Tensor, y: Tensor) -> Tensor | None:
        """Return x + y ("add") or x * y ("multiply"); shapes may differ only in leading 1s."""
        long, short = (x, y) if x.dim() >= y.dim() else (y, x)
        extra = long.dim() - short.dim()
        if long.shape[extra:] != short.shape or long.shape[:extra].count(1) != extra:
            return None
        if not is_plain(x) or not is_plain(y):
            return None
        out = _empty(long)
        run = self._binding(self._pairwise[name], out)
        run(self._address, x.data_ptr(), y.data_ptr(), x.numel(), out.data_ptr())
        return out

    def _binding(self, kernel: BoundKernel, out: Tensor) -> Kernel:
        return kernel.chosen(self._pool, is_short=out.numel() <= SHORT_CALL)


RowLayout = tuple[int, int, int, int, int]
"""Kernel arguments for a tensor: token stride and head stride in bytes, n_tokens, n_heads, n."""


def row_layout(x: Tensor) -> RowLayout | None:
    """Return the layout of x, (T, n) or (T, n_head, n); None if unsupported."""
    if x.dtype is not F32 or not x.is_cpu:
        return None
    shape, strides = x.shape, x.stride()
    if len(shape) == 2 and strides[1] == 1:
        return 4 * strides[0], 0, shape[0], 1, shape[1]
    if len(shape) == 3 and strides[2] == 1:
        return 4 * strides[0], 4 * strides[1], *shape
    return None


def _weights(
    weight: Tensor | None, bias: Tensor | None, rows: RowLayout
) -> tuple[int, int, int] | None:
    """Return the addresses of weight and bias (or 0), and their stride per head, in bytes."""
    n_heads, n = rows[3:]
    first = bias if weight is None else weight
    if first is None:
        return 0, 0, 0
    shape = first.shape
    if (shape != (n,) and shape != (n_heads, n)) or not is_plain(first):
        return None
    if bias is None:
        return first.data_ptr(), 0, 0 if len(shape) == 1 else 4 * n
    if bias.shape != shape or not is_plain(bias):
        return None
    place = 0 if weight is None else weight.data_ptr()
    return place, bias.data_ptr(), 0 if len(shape) == 1 else 4 * n


def is_plain(x: Tensor) -> bool:
    """Return whether x is F32, contiguous and on the CPU."""
    return _is_f32(x) and x.is_contiguous()


def _is_f32(x: Tensor) -> bool:
    return x.dtype is F32 and x.is_cpu


def _empty(x: Tensor) -> Tensor:
    if 4 * x.numel() >= MIN_RESULT_BYTES:
        return result(*x.shape)
    if x.is_contiguous():
        return torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)
