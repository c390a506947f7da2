"""Kernels of norms over the last dimension, also fused with the addition to the residual stream.

A row is a token, or a head of a token. Sizes and strides are in units of UNIT elements, so that the
compiler knows a factor of them and uses wide loads.
"""

import triton
import triton.language as tl

from engine.backends.gpu.kernels.elementwise import activated
from engine.backends.gpu.kernels.quantise import clear, write_bytes, write_numbers


@triton.jit
def squares_factor(squares, n, eps, KIND: tl.constexpr):
    """Return the factor of a row from the sum of its squares.

    It is correctly rounded: ranks on different GPUs must have bit-equal residual streams, and the
    results of approximate instructions differ between GPUs.
    """
    if KIND == "l2":
        return tl.div_rn(1.0, tl.maximum(tl.sqrt_rn(squares), eps))
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, n.to(tl.float32)) + eps))


@triton.jit
def normed(value, inside, n, eps, KIND: tl.constexpr):
    """Normalise a row: KIND is "rms", "layer" (less its mean) or "l2"."""
    if KIND == "layer":
        mean = tl.div_rn(tl.sum(value), n.to(tl.float32))
        value = tl.where(inside, value - mean, 0.0)
    return value * squares_factor(tl.sum(value * value), n, eps, KIND)


@triton.jit
def affine(value, weight, bias, at, inside, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return `value * weight + bias`, each only if there is one."""
    if HAS_WEIGHT:
        value = value * tl.load(weight + at, mask=inside, other=0.0)
    if HAS_BIAS:
        value = value + tl.load(bias + at, mask=inside, other=0.0)
    return value


@triton.jit(do_not_specialize=["n_head", "n", "token_stride", "head_stride", "weight_stride",
                               "gate_stride"])  # fmt: skip
def norm(x, weight, bias, gate, y, n_head, n, token_stride, head_stride, weight_stride,
         gate_stride, eps, KIND: tl.constexpr, ACT: tl.constexpr, SIZE: tl.constexpr,
         UNIT: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
         HAS_GATE: tl.constexpr):  # fmt: skip
    """Normalise one row of x (n_token, n_head, n) in each program, times `ACT(gate)` if HAS_GATE.

    Args:
        x: F32 of any strides, but with contiguous rows.
        weight, bias: F32 (n,), or (n_head, n) with a stride; any pointer where there is none.
        gate: F32 (n_token, n_head * n) with any stride between tokens; or any pointer.
        y: contiguous output, F32 (n_token, n_head, n).
        SIZE: a power of two, at least n.
    """
    row = tl.program_id(0).to(tl.int64)
    head = row % n_head
    n *= UNIT
    at = tl.arange(0, SIZE)
    inside = at < n
    start = (row // n_head * token_stride + head * head_stride) * UNIT
    value = normed(tl.load(x + start + at, mask=inside, other=0.0), inside, n, eps, KIND)
    own = head * weight_stride * UNIT
    value = affine(value, weight + own, bias + own, at, inside, HAS_WEIGHT, HAS_BIAS)
    if HAS_GATE:
        door = gate + row // n_head * gate_stride * UNIT + head * n + at
        value = activated(tl.load(door, mask=inside, other=0.0), ACT) * value
    tl.store(y + row * n + at, value, mask=inside)


@triton.jit(do_not_specialize=["n_head", "n", "token_stride", "head_stride", "weight_stride"])
def long_norm(x, weight, bias, y, n_head, n, token_stride, head_stride, weight_stride, eps,
              KIND: tl.constexpr, SIZE: tl.constexpr, UNIT: tl.constexpr,
              HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """Normalise rows of any length like `norm` without a gate, SIZE elements at a time."""
    row = tl.program_id(0).to(tl.int64)
    head = row % n_head
    n *= UNIT
    x += (row // n_head * token_stride + head * head_stride) * UNIT
    y += row * n
    own = head * weight_stride * UNIT
    at = tl.arange(0, SIZE)
    mean = 0.0
    if KIND == "layer":
        sums = tl.zeros((SIZE,), tl.float32)
        for start in range(0, n, SIZE):
            sums += tl.load(x + start + at, mask=start + at < n, other=0.0)
        mean = tl.div_rn(tl.sum(sums), n.to(tl.float32))
    squares = tl.zeros((SIZE,), tl.float32)
    for start in range(0, n, SIZE):
        value = tl.load(x + start + at, mask=start + at < n, other=mean) - mean
        squares += value * value
    factor = squares_factor(tl.sum(squares), n, eps, KIND)
    for start in range(0, n, SIZE):
        inside = start + at < n
        value = (tl.load(x + start + at, mask=inside, other=0.0) - mean) * factor
        value = affine(
            value, weight + own, bias + own, start + at, inside, HAS_WEIGHT, HAS_BIAS
        )  # fmt: skip
        tl.store(y + start + at, value, mask=inside)


@triton.jit
def add_norm_of(value, x, delta_bias, inner_weight, inner_bias, weight, bias, sum_scale, total, y,
                numbers, facts, counters, n, inner_eps, scale, eps, INNER: tl.constexpr,
                KIND: tl.constexpr, X_BYTES: tl.constexpr, N_COUNTERS: tl.constexpr,
                SIZE: tl.constexpr, HAS_DELTA_BIAS: tl.constexpr,
                HAS_INNER_WEIGHT: tl.constexpr, HAS_INNER_BIAS: tl.constexpr,
                HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
                HAS_SUM_SCALE: tl.constexpr):  # fmt: skip
    """Compute `add_norm` of this program's row; `value` (SIZE,) is delta's row, n in elements."""
    row = tl.program_id(0).to(tl.int64) * n
    at = tl.arange(0, SIZE)
    inside = at < n
    value = affine(value, delta_bias, delta_bias, at, inside, False, HAS_DELTA_BIAS)
    if INNER != "none":
        value = normed(value, inside, n, inner_eps, INNER)
        value = affine(
            value, inner_weight, inner_bias, at, inside, HAS_INNER_WEIGHT, HAS_INNER_BIAS
        )  # fmt: skip
    if HAS_SCALE:
        value = value * scale
    value = tl.load(x + row + at, mask=inside, other=0.0) + value
    if HAS_SUM_SCALE:
        value = value * tl.load(sum_scale)
    tl.store(total + row + at, value, mask=inside)
    if KIND != "none":
        value = normed(value, inside, n, eps, KIND)
        value = affine(value, weight, bias, at, inside, HAS_WEIGHT, HAS_BIAS)
        tl.store(y + row + at, value, mask=inside)
        if X_BYTES >= 0:
            clear(counters, N_COUNTERS)
            halves = tl.reshape(tl.where(inside, value, 0.0), (SIZE // 16, 16))
            half = tl.arange(0, SIZE // 16)
            index = tl.program_id(0)
            if X_BYTES > 0:
                write_bytes(halves, index, half, half * 16 < n, n // 32, numbers, facts, X_BYTES)
            else:
                write_numbers(halves, index, half, half * 16 < n, n // 32, numbers, facts)


@triton.jit(do_not_specialize=["n"])
def add_norm(x, delta, delta_bias, inner_weight, inner_bias, weight, bias, sum_scale, total, y,
             numbers, facts, counters, n, inner_eps, scale, eps, INNER: tl.constexpr,
             KIND: tl.constexpr, X_BYTES: tl.constexpr, N_COUNTERS: tl.constexpr,
             SIZE: tl.constexpr, UNIT: tl.constexpr, HAS_DELTA_BIAS: tl.constexpr,
             HAS_INNER_WEIGHT: tl.constexpr, HAS_INNER_BIAS: tl.constexpr,
             HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
             HAS_SUM_SCALE: tl.constexpr):  # fmt: skip
    """Compute `total = (x + inner(delta + delta_bias) * scale) * sum_scale; y = norm(total)`.

    A row for each program.

    Args:
        x, delta, total, y: contiguous F32 (rows, n); y may be any pointer if KIND is "none".
        delta_bias, weight, bias, inner_weight, inner_bias: F32 (n,); any pointer where there is
            none.
        sum_scale: F32 (1,), or any pointer.
        numbers, facts, counters: outputs, y quantised as by `quantise`; n is a multiple of 32.
        INNER: kind of the norm of delta, or "none".
        KIND: kind of the norm of the sum, or "none".
        X_BYTES: bytes of each quantised number, 0 for F32; -1 to write none.
        SIZE: a power of two, at least n.
    """
    n *= UNIT
    row = tl.program_id(0).to(tl.int64) * n
    at = tl.arange(0, SIZE)
    value = tl.load(delta + row + at, mask=at < n, other=0.0)
    add_norm_of(
        value, x, delta_bias, inner_weight, inner_bias, weight, bias, sum_scale, total, y, numbers,
        facts, counters, n, inner_eps, scale, eps, INNER, KIND, X_BYTES, N_COUNTERS, SIZE,
        HAS_DELTA_BIAS, HAS_INNER_WEIGHT, HAS_INNER_BIAS, HAS_WEIGHT, HAS_BIAS, HAS_SCALE,
        HAS_SUM_SCALE,
    )  # fmt: skip
