"""Rotary position embedding (arXiv 2104.09864): (a, b) becomes (a cos - b sin, a sin + b cos)."""

from __future__ import annotations

from functools import partial

from llvmlite import ir

from engine.backends.cpu.kernels.language.loops import (
    Named,
    SimdLanes,
    add_row_kernel,
    for_each_vector,
)
from engine.backends.cpu.kernels.language.values import LANES, VOID, Code, Value, internal
from engine.backends.cpu.kernels.running.thread_pool import add_run

STYLES = ("norm", "neox")
"""How elements are paired; see `engine.model.layers.norm`."""

ARGUMENTS = (
    "x", "token_stride", "head_stride", "n_tokens", "n_heads", "head_dim", "n_pairs", "cos", "sin",
    "out",
)  # fmt: skip
"""Arguments of the kernels. x is F32, (n_tokens, n_heads, head_dim), with strides in bytes; out has
its shape, contiguous. cos and sin are (n_tokens, n_pairs). Elements after the pairs are copied."""

EVENS, ODDS = range(0, 2 * LANES, 2), range(1, 2 * LANES, 2)
"""Indices of the even and odd elements in two vectors."""

INTERLEAVED = [n // 2 + n % 2 * LANES for n in range(2 * LANES)]
"""Indices that interleave the elements of two vectors."""


def build(module: ir.Module) -> None:
    """Emit a kernel `style(pool, *ARGUMENTS)` for each style."""
    add_run(module)
    for style in STYLES:
        _add_head(module, style)
        add_row_kernel(
            module, style, ARGUMENTS, lambda given: given["n_heads"] * given["head_dim"],
            partial(_emit_token, style=style),
        )  # fmt: skip


def _emit_token(code: Code, given: Named, token: Value, style: str) -> None:
    n_heads, head_dim, n_pairs = given["n_heads"], given["head_dim"], given["n_pairs"]
    cos_sin = [given[name] + token * n_pairs * 4 for name in ("cos", "sin")]
    with code.loop(code.number(0), n_heads) as head:
        x = given["x"] + token * given["token_stride"] + head * given["head_stride"]
        out = given["out"] + (token * n_heads + head) * head_dim * 4
        code.call(f"{style}_head", VOID, x, head_dim, n_pairs, *cos_sin, out)


def _add_head(module: ir.Module, style: str) -> None:
    """Emit `style_head(x, head_dim, n_pairs, cos, sin, out)`: rotates one head of one token."""
    code, (x, head_dim, n_pairs, cos, sin, out) = internal(module, f"{style}_head", 6)

    def rotate(lanes: SimdLanes) -> None:
        c, s = lanes.load(cos), lanes.load(sin)
        low, high = lanes.doubled()
        if style == "norm":
            both = low.load(x), high.load(x)
            a, b = (both[0].shuffle(part, both[1]) for part in (EVENS, ODDS))
        else:
            a, b = lanes.load(x), lanes.load(x + n_pairs * 4)
        first, second = code.fma(a, c, b * s * -1.0), code.fma(a, s, b * c)
        if style == "norm":
            low.store(first.shuffle(INTERLEAVED[:LANES], second), out)
            high.store(first.shuffle(INTERLEAVED[LANES:], second), out)
        else:
            lanes.store(first, out)
            lanes.store(second, out + n_pairs * 4)

    for_each_vector(code, n_pairs, rotate)
    rest = n_pairs * 8
    for_each_vector(
        code, head_dim - n_pairs * 2, lambda lanes: lanes.store(lanes.load(x + rest), out + rest)
    )
    code.builder.ret_void()
