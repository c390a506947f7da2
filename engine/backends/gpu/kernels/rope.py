"""RoPE kernels (arXiv 2104.09864): a pair (a, b) becomes (a cos - b sin, a sin + b cos)."""

import triton
import triton.language as tl

TURN = tl.constexpr(6.283185307179586)
"""A whole turn, 2 π."""


@triton.jit(do_not_specialize=["n_pairs"])
def angles(turns, positions, cos, sin, n_pairs, magnitude, SIZE: tl.constexpr):
    """Compute cosines and sines, times `magnitude`; a token for each program.

    Whole turns are removed in F64, of which consumer GPUs have little; the rest is F32.

    Args:
        turns: turn of each pair from position to position, F64 (n_pairs,); 1 is a whole turn.
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
    """Rotate HEADS heads of a token, from head `first` on; see `rotate`."""
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
    """Rotate queries and keys; programs: (tokens, blocks of HEADS heads, first those of q).

    Args:
        q, k: F32 (tokens, n_q or n_k, dim), heads contiguous; strides in elements.
        q_out, k_out: contiguous outputs of the same shapes.
        q_weight, k_weight: weights of the heads' norm that comes first if HAS_NORM, F32 (dim,):
            `x / sqrt(mean(x²) + eps) * weight`.
        cos, sin: F32 (tokens, n_pairs).
        IS_NEOX: whether pairs are the elements i and i + n_pairs, else 2 i and 2 i + 1.
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
