"""Contexts longer than the original: LongRoPE, and YaRN on some of the layers."""

from math import log, sqrt
from typing import Any

import numpy as np
from transformers import Olmo3Config, Phi3Config

from tests.helpers.hf_models.family import Array, Config, Family
from tests.helpers.hf_models.llama import PHI3
from tests.helpers.hf_models.parts import (
    ATTENTION,
    EMBEDDING,
    FULL,
    GATED_FFN,
    SIZES,
    WINDOW,
    full_yarn,
    rope_size,
    sizes,
    yarn_on_full_layers,
)


def phi3(c: Config) -> dict[str, Any]:
    rope = c.rope_parameters
    n_ctx = c.original_max_position_embeddings
    return {
        **sizes(c),
        **rope_size(c, rope["partial_rotary_factor"]),
        "rope.freq_base": rope["rope_theta"],
        "rope.scaling.original_context_length": n_ctx,
        "rope.scaling.attn_factor": sqrt(1 + log(c.max_position_embeddings / n_ctx) / log(n_ctx)),
        "attention.sliding_window": 2047,
    }


def divisors(c: Config) -> dict[str, Array]:
    return {
        f"rope_factors_{kind}.weight": np.array(c.rope_parameters[f"{kind}_factor"])
        for kind in ("long", "short")
    }


def longrope_family(name: str, n_ctx: int) -> Family:
    """Return Phi 3 with an original context of `n_ctx` tokens, rotating 3/4 of each head."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.1],
        "long_factor": [1.3, 2.0, 3.1, 5.0, 9.0, 17.0],
    }
    return Family(
        name,
        "phi3",
        None,
        lambda: Phi3Config(
            **SIZES,
            num_hidden_layers=2,
            original_max_position_embeddings=n_ctx,
            sliding_window=None,
            rope_parameters=rope,
        ),
        phi3,
        PHI3,
        divisors,
    )


def olmo3(c: Config) -> dict[str, Any]:
    return {
        **sizes(c),
        **full_yarn(c),
        "attention.sliding_window": c.sliding_window,
        "attention.sliding_window_pattern": [kind == WINDOW for kind in c.layer_types],
    }


FAMILIES = [
    longrope_family("phi3-short", 64),
    longrope_family("phi3-long", 32),
    Family(
        "olmo3",
        "olmo2",
        None,
        lambda: Olmo3Config(
            **SIZES,
            num_hidden_layers=3,
            sliding_window=12,
            layer_types=[WINDOW, FULL, WINDOW],
            rope_parameters=yarn_on_full_layers(),
        ),
        olmo3,
        {
            **EMBEDDING,
            **ATTENTION,
            **GATED_FFN,
            "post_attention_layernorm.weight": "post_attention_norm.weight",
            "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
        },
    ),
]
