"""Kernels that run between products: activations, norms, RoPE, and quantising rows for gemv.

A row is one token or one head of a token; its elements are contiguous. Sizes and strides are in
units of UNIT elements, which tells the compiler a common factor, so that it uses wide loads. Norms
are over the last dimension; they can be fused with the addition to the residual stream. RoPE
(arXiv 2104.09864) turns a pair (a, b) into (a cos - b sin, a sin + b cos).

Quantised activations have blocks of 32 columns, aligned with the matrix's extent; columns outside
the matrix are zeros. Bytes are rounded as in `cpu.kernels.products.panels`; 16 columns share a
scale.
"""

import triton
import triton.language as tl

from engine.model.forward.operands import OAI_ALPHA

ALPHA = tl.constexpr(OAI_ALPHA)
TANH = tl.constexpr(2 * (2 / 3.141592653589793) ** 0.5)
"""Twice the factor in the tanh approximation of GELU: `1 + tanh(z) = 2 sigmoid(2 z)`."""


@triton.jit
def sigmoid(x):
    """Return `1 / (1 + e^-x)`, without overflow for any x."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1.0 + small)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """Return any activation of x except "oai"; see `forward.operands.Activation` and `gate`."""
    if KIND == "silu":
        return x * sigmoid(x)
    elif KIND == "gelu":
        return x * sigmoid(x * TANH * (1.0 + 0.044715 * x * x))
    elif KIND == "relu":
        return tl.maximum(x, 0.0)
    elif KIND == "relu2":
        x = tl.maximum(x, 0.0)
        return x * x
    elif KIND == "sigmoid":
        return sigmoid(x)
    else:
        tl.static_assert(KIND == "none")
        return x


@triton.jit
def gate(x, up, limit, KIND: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """Return `act(x) * up` within limits; see `Ops.gated`."""
    if KIND == "oai":
        x = tl.minimum(x, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return x * sigmoid(x * ALPHA) * (up + 1.0)
    else:  # Triton also compiles what follows a return
        x = activated(x, KIND)
        if HAS_LIMIT:
            x = tl.minimum(x, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
        return x * up


@triton.jit
def log1p(x):
    """Return `ln(1 + x)` for x ≥ 0; the rounding error in 1 + x cancels between the two factors."""
    u = 1.0 + x
    kept = u - 1.0
    return tl.where(kept == 0.0, x, tl.log(u) * (x / tl.where(kept == 0.0, 1.0, kept)))


@triton.jit
def softplus(x):
    """Return `ln(1 + e^x)`, or x if it is above 20, as in torch."""
    return tl.where(x > 20.0, x, log1p(tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def expm1(x):
    """Return `e^x - 1` for x ≤ about 0; near 0 by a Taylor series, which avoids cancellation."""
    series = 1.0 + x / 7.0
    for i in tl.static_range(6, 1, -1):
        series = 1.0 + x / i * series
    return tl.where(tl.abs(x) < 0.5, x * series, tl.exp(x) - 1.0)


@triton.jit
def place(n, BLOCK: tl.constexpr):
    """Return a program's row and element indices; consecutive programs share a row."""
    program, n_block = tl.program_id(0), tl.cdiv(n, BLOCK)
    return (program // n_block).to(tl.int64), program % n_block * BLOCK + tl.arange(0, BLOCK)


@triton.jit(do_not_specialize=["n_head", "n", "x_stride", "x_head", "up_stride", "up_head"])
def gated(x, up, y, n_head, n, x_stride, x_head, up_stride, up_head, limit, KIND: tl.constexpr,
          HAS_UP: tl.constexpr, HAS_LIMIT: tl.constexpr, UNIT: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Compute `act(x) * up`, or `act(x)` if not HAS_UP; BLOCK elements of a row per program.

    Args:
        x, up: F32 (n_token, n_head, n) with any strides between tokens and between heads.
        y: contiguous output, F32 (n_token, n_head, n).
    """
    n *= UNIT
    row, at = place(n, BLOCK)
    token, head = row // n_head, row % n_head
    inside = at < n
    start = (token * x_stride + head * x_head) * UNIT
    value = tl.load(x + start + at, mask=inside, other=0.0)
    if HAS_UP:
        start = (token * up_stride + head * up_head) * UNIT
        factor = tl.load(up + start + at, mask=inside, other=0.0)
        value = gate(value, factor, limit, KIND, HAS_LIMIT)
    else:
        value = activated(value, KIND)
    tl.store(y + row * n + at, value, mask=inside)


@triton.jit(do_not_specialize=["n", "x_stride"])
def xielu(x, y, n, x_stride, positive, negative, beta, eps, UNIT: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Compute xIELU (`architectures.apertus.Xielu`) for x (n_row, n); otherwise like `gated`."""
    n *= UNIT
    row, at = place(n, BLOCK)
    inside = at < n
    value = tl.load(x + row * x_stride * UNIT + at, mask=inside, other=0.0)
    below = (expm1(tl.minimum(value, eps)) - value) * negative
    value = tl.where(value > 0, positive * value * value, below) + beta * value
    tl.store(y + row * n + at, value, mask=inside)


@triton.jit(do_not_specialize=["n", "x_stride"])
def softplus_rows(x, bias, y, n, x_stride, HAS_BIAS: tl.constexpr, UNIT: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Compute `ln(1 + e^(x + bias))` for x (n_row, n) and bias (n,); otherwise like `gated`."""
    n *= UNIT
    row, at = place(n, BLOCK)
    inside = at < n
    value = tl.load(x + row * x_stride * UNIT + at, mask=inside, other=0.0)
    if HAS_BIAS:
        value += tl.load(bias + at, mask=inside, other=0.0)
    tl.store(y + row * n + at, softplus(value), mask=inside)


@triton.jit(do_not_specialize=["n_in", "n", "x_stride", "y_stride", "other_stride"])
def opened(x, door, y, other, out, n_in, n, x_stride, y_stride, other_stride,
           HAS_OTHER: tl.constexpr, UNIT: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Compute `other + sigmoid(x · door) * y`, one token per program.

    Args:
        x: F32 (n_token, n_in) with any stride between tokens, as for y and other.
        door: the gate's weights, F32 (n_in,).
        y, other: F32 (n_token, n); other is any pointer if not HAS_OTHER.
        out: contiguous output, F32 (n_token, n).
        SIZE: a power of two, at least n_in and n.
    """
    n_in *= UNIT
    n *= UNIT
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    read, inside = at < n_in, at < n
    value = tl.load(x + row * x_stride * UNIT + at, mask=read, other=0.0)
    factor = sigmoid(tl.sum(value * tl.load(door + at, mask=read, other=0.0)))
    value = tl.load(y + row * y_stride * UNIT + at, mask=inside, other=0.0) * factor
    if HAS_OTHER:
        value += tl.load(other + row * other_stride * UNIT + at, mask=inside, other=0.0)
    tl.store(out + row * n + at, value, mask=inside)


TINY = tl.constexpr(2.0**-100)
"""16 columns whose largest magnitude is below this become zeros; 127 / less might be infinite."""

ROUNDER, ROUNDER_BITS = tl.constexpr(1.5 * 2.0**23), tl.constexpr(0x4B400000)
"""A number whose addition rounds to the nearest integer, ties to even, and leaves that integer in
the low bits; and the number's bits."""


@triton.jit
def halves_of(x, row, lead, n_columns, n_blocks, BLOCKS: tl.constexpr):
    """Return a row's elements (2 * BLOCKS, 16), the half blocks' indices, and a mask of them."""
    half = tl.program_id(1) * (2 * BLOCKS) + tl.arange(0, 2 * BLOCKS)
    column = half[:, None] * 16 + tl.arange(0, 16)[None, :] - lead
    inside = (column >= 0) & (column < n_columns)
    values = tl.load(x + row.to(tl.int64) * n_columns + column, mask=inside, other=0.0)
    return values, half, half < 2 * n_blocks


@triton.jit
def clear(counters, N_COUNTERS: tl.constexpr):
    """Set the counters to zero, from one program, for the products with these rows."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(counters + tl.arange(0, N_COUNTERS), tl.zeros((N_COUNTERS,), tl.int32))


@triton.jit
def rounded(values, LARGEST: tl.constexpr):
    """Return each row of (n, 16) as integers within ±LARGEST, and its scale (n,)."""
    size = tl.max(tl.abs(values), axis=1)
    inverse = tl.where(size < TINY, 0.0, tl.div_rn(1.0 * LARGEST, tl.maximum(size, TINY)))
    whole = tl.fma(values, inverse[:, None], ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS
    invalid = tl.sum(values * 0.0, axis=1)  # NaN if any value is NaN or infinite
    return whole, size * (1.0 / LARGEST) + invalid


@triton.jit
def write_bytes(values, row, half, exists, n_blocks, numbers, facts, X_BYTES: tl.constexpr):
    """Write a row's half blocks (see `halves_of`) in the format of `as_bytes`."""
    block = row.to(tl.int64) * n_blocks + half // 2
    at = numbers + block[:, None] * (32 * X_BYTES) + (half[:, None] % 2 * 16 + tl.arange(0, 16))
    mask = exists[:, None]
    if X_BYTES == 1:
        whole, scale = rounded(values, 127)
        tl.store(at, whole.to(tl.int8), mask=mask)
    else:
        whole, scale = rounded(values, 127 * 255 + 127)
        near = tl.fma(whole.to(tl.float32), 1.0 / 255, ROUNDER)
        upper = near.to(tl.int32, bitcast=True) - ROUNDER_BITS
        tl.store(at, upper.to(tl.int8), mask=mask)
        tl.store(at + 32, (whole - upper * 255).to(tl.int8), mask=mask)
    goal = facts + block * 4 + half % 2
    tl.store(goal, scale.to(tl.int32, bitcast=True), mask=exists)
    tl.store(goal + 2, tl.sum(whole, axis=1), mask=exists)


@triton.jit
def write_numbers(values, row, half, exists, n_blocks, numbers, facts):
    """Write a row's half blocks (see `halves_of`) in the format of `as_numbers`."""
    place = row.to(tl.int64) * n_blocks * 2 + half
    at = numbers + place[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(at, values, mask=exists[:, None])
    tl.store(facts + place, tl.sum(values, axis=1), mask=exists)


@triton.jit(do_not_specialize=["lead", "n_columns", "n_blocks"])
def as_bytes(x, lead, n_columns, n_blocks, numbers, facts, counters, X_BYTES: tl.constexpr,
             BLOCKS: tl.constexpr, N_COUNTERS: tl.constexpr):  # fmt: skip
    """Quantise rows to bytes; BLOCKS blocks of a row per program.

    Args:
        x: contiguous F32 (rows, n_columns).
        lead, n_columns, n_blocks: see `Extent`.
        numbers: output, bytes (rows, n_blocks, X_BYTES, 32); if X_BYTES is 2, the byte with weight
            255 comes first.
        facts: output, 32-bit words (rows, n_blocks, 4): the scale (F32) for each 16 columns, then
            the sum of their integers.
        counters: output, zeros, int32 (N_COUNTERS,).
    """
    clear(counters, N_COUNTERS)
    row = tl.program_id(0)
    values, half, exists = halves_of(x, row, lead, n_columns, n_blocks, BLOCKS)
    write_bytes(values, row, half, exists, n_blocks, numbers, facts, X_BYTES)


@triton.jit(do_not_specialize=["lead", "n_columns", "n_blocks"])
def as_numbers(x, lead, n_columns, n_blocks, numbers, facts, counters, BLOCKS: tl.constexpr,
               N_COUNTERS: tl.constexpr):  # fmt: skip
    """Copy rows into F32 blocks without rounding; arguments as in `as_bytes`, except:

    Args:
        numbers: output, F32 (rows, n_blocks, 32).
        facts: output, the sum of each 16 columns, F32 (rows, n_blocks, 2).
    """
    clear(counters, N_COUNTERS)
    row = tl.program_id(0)
    values, half, exists = halves_of(x, row, lead, n_columns, n_blocks, BLOCKS)
    write_numbers(values, row, half, exists, n_blocks, numbers, facts)


@triton.jit
def squares_factor(squares, n, eps, KIND: tl.constexpr):
    """Return a row's normalisation factor, given the sum of its squares.

    The factor is correctly rounded: ranks on different GPUs need bit-equal residual streams, and
    approximate instructions give different results on different GPUs.
    """
    if KIND == "l2":
        return tl.div_rn(1.0, tl.maximum(tl.sqrt_rn(squares), eps))
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, n.to(tl.float32)) + eps))


@triton.jit
def normed(value, inside, n, eps, KIND: tl.constexpr):
    """Normalise a row; KIND is "rms", "layer" (which also subtracts the mean) or "l2"."""
    if KIND == "layer":
        mean = tl.div_rn(tl.sum(value), n.to(tl.float32))
        value = tl.where(inside, value - mean, 0.0)
    return value * squares_factor(tl.sum(value * value), n, eps, KIND)


@triton.jit
def affine(value, weight, bias, at, inside, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return `value * weight + bias`, leaving out whichever is absent."""
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
    """Normalise one row of x (n_token, n_head, n) per program; multiply by `ACT(gate)` if HAS_GATE.

    Args:
        x: F32 with any strides, but contiguous rows.
        weight, bias: F32 (n,), or (n_head, n) with a stride; any pointer if unused.
        gate: F32 (n_token, n_head * n) with any stride between tokens; any pointer if unused.
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
    """Normalise rows of any length like `norm` without a gate, SIZE elements per iteration."""
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
    """Compute `add_norm` for this program's row; `value` (SIZE,) is delta's row, n in elements."""
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

    Each program computes one row.

    Args:
        x, delta, total, y: contiguous F32 (rows, n); y may be any pointer if KIND is "none".
        delta_bias, weight, bias, inner_weight, inner_bias: F32 (n,); any pointer if unused.
        sum_scale: F32 (1,); any pointer if unused.
        numbers, facts, counters: outputs, y quantised as by `as_bytes`; n is a multiple of 32.
        INNER: norm applied to delta, or "none".
        KIND: norm applied to the sum, or "none".
        X_BYTES: bytes per quantised number; 0 for F32, -1 to write none.
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


TURN = tl.constexpr(6.283185307179586)  # 2 π


@triton.jit(do_not_specialize=["n_pairs"])
def angles(turns, positions, cos, sin, n_pairs, magnitude, SIZE: tl.constexpr):
    """Compute cosines and sines, times `magnitude`; one token per program.

    Whole turns are removed in F64, in which consumer GPUs are slow; the rest is F32.

    Args:
        turns: each pair's rotation per position, in whole turns, F64 (n_pairs,).
        positions: integers (tokens,).
        cos, sin: outputs, F32 (tokens, n_pairs).
        SIZE: a power of two, at least n_pairs.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    inside = at < n_pairs
    turn = tl.load(turns + at, mask=inside, other=0.0)
    turn *= tl.load(positions + token).to(tl.float64)
    turn -= tl.floor(turn + 0.5)
    angle = (turn * TURN).to(tl.float32)
    at += token * n_pairs
    tl.store(cos + at, tl.cos(angle) * magnitude, mask=inside)
    tl.store(sin + at, tl.sin(angle) * magnitude, mask=inside)


@triton.jit
def _turn(
    x, x_token, x_head, y, first, n_head, weight, eps, n_pairs, dim, cos, sin,
    HAS_NORM: tl.constexpr, IS_NEOX: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = first + tl.arange(0, HEADS)
    there = (head < n_head)[:, None]
    x += token * x_token + head[:, None] * x_head
    y += (token * n_head + head[:, None]) * dim
    pair = tl.arange(0, PAIRS)
    c = tl.load(cos + token * n_pairs + pair, mask=pair < n_pairs, other=0.0)[None, :]
    s = tl.load(sin + token * n_pairs + pair, mask=pair < n_pairs, other=0.0)[None, :]
    inside = there & (pair < n_pairs)[None, :]
    low = (pair if IS_NEOX else 2 * pair)[None, :]
    high = low + (n_pairs if IS_NEOX else 1)
    a = tl.load(x + low, mask=inside, other=0.0)
    b = tl.load(x + high, mask=inside, other=0.0)
    if REST:
        rest = 2 * n_pairs + tl.arange(0, REST)[None, :]
        others = tl.load(x + rest, mask=there & (rest < dim), other=0.0)
    if HAS_NORM:
        total = tl.sum(a * a + b * b, 1)
        if REST:
            total += tl.sum(others * others, 1)
        factor = tl.rsqrt(total / dim + eps)[:, None]
        a *= factor * tl.load(weight + low, mask=low < dim, other=0.0)
        b *= factor * tl.load(weight + high, mask=high < dim, other=0.0)
        if REST:
            others *= factor * tl.load(weight + rest, mask=rest < dim, other=0.0)
    tl.store(y + low, a * c - b * s, mask=inside)
    tl.store(y + high, a * s + b * c, mask=inside)
    if REST:
        tl.store(y + rest, others, mask=there & (rest < dim))


@triton.jit(
    do_not_specialize=[
        "q_token", "q_head", "n_q", "k_token", "k_head", "n_k", "n_pairs", "dim", "n_block_q",
    ]
)  # fmt: skip
def rotate(
    q, q_token, q_head, q_out, n_q, q_weight, q_eps, k, k_token, k_head, k_out, n_k, k_weight,
    k_eps, cos, sin, n_pairs, dim, n_block_q, HAS_NORM: tl.constexpr, IS_NEOX: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rotate queries and keys; the grid is (tokens, blocks of HEADS heads in q, then in k).

    Args:
        q, k: F32 (tokens, n_q or n_k, dim) with contiguous heads; strides in elements.
        q_out, k_out: contiguous outputs with the same shapes.
        q_weight, k_weight: if HAS_NORM, weights for normalising each head before the rotation,
            F32 (dim,): `x / sqrt(mean(x²) + eps) * weight`.
        cos, sin: F32 (tokens, n_pairs).
        IS_NEOX: whether a pair is elements i and i + n_pairs; otherwise it is 2 i and 2 i + 1.
        PAIRS, REST: powers of two, at least n_pairs and dim - 2 n_pairs; the rest of a head is
            copied.
    """
    block = tl.program_id(1)
    if block < n_block_q:
        _turn(q, q_token, q_head, q_out, block * HEADS, n_q, q_weight, q_eps, n_pairs, dim, cos,
              sin, HAS_NORM, IS_NEOX, HEADS, PAIRS, REST)  # fmt: skip
    else:
        _turn(k, k_token, k_head, k_out, (block - n_block_q) * HEADS, n_k, k_weight, k_eps, n_pairs,
              dim, cos, sin, HAS_NORM, IS_NEOX, HEADS, PAIRS, REST)  # fmt: skip
