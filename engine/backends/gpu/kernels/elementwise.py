"""Element-wise kernels and functions.

The elements of a row are contiguous; sizes and strides are in units of UNIT elements, as in `norm`.
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
    """Return the activation of x, see `forward.operands.Activation`; "none" changes nothing.

    "oai" needs `gate`.
    """
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
    """Return `act(x) * up` within limits, see `Ops.gated`."""
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
    """Return `ln(1 + x)` for x ≥ 0; the rounding error of 1 + x cancels between both factors."""
    u = 1.0 + x
    kept = u - 1.0
    return tl.where(kept == 0.0, x, tl.log(u) * (x / tl.where(kept == 0.0, 1.0, kept)))


@triton.jit
def softplus(x):
    """Return `ln(1 + e^x)`; above 20 that is x, as in torch."""
    return tl.where(x > 20.0, x, log1p(tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def expm1(x):
    """Return `e^x - 1` for x ≤ about 0: near 0 by Taylor's series, where no digits cancel."""
    series = 1.0 + x / 7.0
    for i in tl.static_range(6, 1, -1):
        series = 1.0 + x / i * series
    return tl.where(tl.abs(x) < 0.5, x * series, tl.exp(x) - 1.0)


@triton.jit
def place(n, BLOCK: tl.constexpr):
    """Return a program's row and element indices; the programs of one row are neighbours."""
    program, n_block = tl.program_id(0), tl.cdiv(n, BLOCK)
    return (program // n_block).to(tl.int64), program % n_block * BLOCK + tl.arange(0, BLOCK)


@triton.jit(do_not_specialize=["n_head", "n", "x_stride", "x_head", "up_stride", "up_head"])
def gated(x, up, y, n_head, n, x_stride, x_head, up_stride, up_head, limit, KIND: tl.constexpr,
          HAS_UP: tl.constexpr, HAS_LIMIT: tl.constexpr, UNIT: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Compute `act(x) * up`, or `act(x)` without `up`; BLOCK elements of a row for each program.

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
    """Compute xIELU (`architectures.apertus.Xielu`) of x (n_row, n); see `gated` for the rest."""
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
    """Compute `ln(1 + e^(x + bias))` of x (n_row, n) and bias (n,); see `gated` for the rest."""
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
    """Compute `other + sigmoid(x · door) * y`, one token for each program.

    Args:
        x: F32 (n_token, n_in) with any stride between tokens, like y and other.
        door: weights of the gate, F32 (n_in,).
        y, other: F32 (n_token, n); other is any pointer without HAS_OTHER.
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
