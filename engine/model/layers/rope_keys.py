"""Reader of a file's `rope.*` keys into `RopeParams`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.errors import ModelFileError
from engine.model.forward.operands import RopeParams, RopeStyle

if TYPE_CHECKING:
    from engine.load_params import LoadParams
    from engine.model.layers.keys import Keys

SCALING_TYPES = ("none", "linear", "yarn", "longrope")
"""Supported values of `rope.scaling.type`."""

DEFAULT_BASE = 10000.0
"""Base of the frequencies where a file has none (arXiv 2104.09864)."""


def stretched(rope: RopeParams, params: LoadParams) -> RopeParams:
    """Return the parameters of RoPE with what a load sets in place of the file's values.

    The meaning of each is llama.cpp's: without a factor, a type keeps the file's.
    """
    scale = 1 / params.rope_factor if params.rope_factor else rope.scale
    kind = params.rope_scaling
    return replace(
        rope,
        base=params.rope_base or rope.base,
        scale=1.0 if kind == "none" else scale,
        yarn=kind == "yarn" if kind else rope.yarn,
    )


def read_rope(keys: Keys, head_dim: int, style: RopeStyle) -> RopeParams:
    """Read the `rope.*` keys of a file.

    A factor without a type means linear scaling, as in llama.cpp.

    Raises:
        ModelFileError: the type of scaling is not supported.
    """
    kind = keys.text("rope.scaling.type", "linear")
    if kind not in SCALING_TYPES:
        path = keys.meta.path
        message = f"{path.name} scales positions by {kind[:40]!r}, which Tandem cannot do"
        raise ModelFileError(path, f"{message} yet.", "Pick another model.")
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 1.0)
    n_ctx_train = keys.integer("context_length", 0)
    return RopeParams(
        n_rot=keys.integer("rope.dimension_count", head_dim),
        style=style,
        base=keys.number("rope.freq_base", DEFAULT_BASE),
        scale=1.0 if kind in ("none", "longrope") or factor == 0 else 1.0 / factor,
        yarn=kind == "yarn",
        n_ctx_orig=keys.integer("rope.scaling.original_context_length", n_ctx_train),
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0),
    )
