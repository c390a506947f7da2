"""Models with layers without RoPE: Llama 4 and SmolLM 3."""

from dataclasses import replace
from typing import Any

import numpy as np
from transformers import Llama4TextConfig, SmolLM3Config

from tests.helpers.hf_models.family import Array, Config, Family
from tests.helpers.hf_models.parts import (
    ATTENTION,
    DENSE,
    EMBEDDING,
    FULL,
    NEIGHBOURS,
    PRE_NORMS,
    SIZES,
    experts,
    head_sizes,
    rope_base,
    rope_size,
    sizes,
)


def llama4(c: Config) -> dict[str, Any]:
    return {
        **sizes(c),
        **head_sizes(c),
        **rope_base(c),
        **rope_size(c),
        **experts(c),
        "feed_forward_length": c.intermediate_size_mlp,
        "expert_feed_forward_length": c.intermediate_size,
        "interleave_moe_layer_step": c.interleave_moe_layer_step,
    }


def gate_and_up(values: Array, _: Config) -> dict[str, Array]:
    """Split matrices (E, in, gate then up) in two, transposed."""
    gate, up = np.split(values.swapaxes(1, 2), 2, axis=1)
    return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}


def llama4_config(**changes: Any) -> Config:
    return Llama4TextConfig(
        **SIZES | {"num_hidden_layers": 4, "num_local_experts": 3} | changes,
        head_dim=24,
        intermediate_size_mlp=72,
        interleave_moe_layer_step=2,
    )


LLAMA4 = Family(
    "llama4",
    "llama4",
    "llama4-q4_k_m.gguf",
    llama4_config,
    llama4,
    {
        **EMBEDDING,
        **ATTENTION,
        **PRE_NORMS,
        **{f"feed_forward.{p}_proj.weight": f"ffn_{p}.weight" for p in ("gate", "up", "down")},
        **{
            f"feed_forward.shared_expert.{p}_proj.weight": f"ffn_{p}_shexp.weight"
            for p in ("gate", "up", "down")
        },
        "feed_forward.router.weight": "ffn_gate_inp.weight",
        "feed_forward.experts.gate_up_proj": gate_and_up,
        "feed_forward.experts.down_proj": lambda v, _: {"ffn_down_exps.weight": v.swapaxes(1, 2)},
    },
)

FAMILIES = [
    LLAMA4,
    replace(
        LLAMA4,
        name="llama4-128",
        like=None,
        config=lambda: llama4_config(
            num_hidden_layers=2, intermediate_size=32, num_local_experts=128, use_qk_norm=False
        ),
    ),
    replace(
        LLAMA4,
        name="llama4-all-rotated",
        like=None,
        config=lambda: llama4_config(
            no_rope_layers=[1] * 4, layer_types=[FULL] * 4, num_experts_per_tok=2
        ),
        metadata=lambda c: {**llama4(c), "attention.sliding_window": 0},
    ),
    Family(
        "smollm3",
        "smollm3",
        "smollm3-q4_k_m.gguf",
        lambda: SmolLM3Config(**SIZES, num_hidden_layers=5),
        lambda c: {**sizes(c), **rope_base(c), **rope_size(c)},
        {**DENSE, **NEIGHBOURS},
    ),
]
