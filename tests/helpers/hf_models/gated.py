"""Attention with gates: AFMoE and Laguna."""

from typing import Any

from transformers import AfmoeConfig, LagunaConfig

from tests.helpers.hf_models.family import Config, Family
from tests.helpers.hf_models.parts import (
    ATTENTION,
    DENSE,
    EMBEDDING,
    FULL,
    GATED_FFN,
    SHARED_EXPERTS,
    SIZES,
    WINDOW,
    expert_width,
    experts,
    head_sizes,
    rope_base,
    rope_size,
    sizes,
)

SMALL_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
}


def afmoe(c: Config) -> dict[str, Any]:
    return {
        **sizes(c),
        **head_sizes(c),
        **rope_base(c),
        **rope_size(c),
        **experts(c),
        **expert_width(c),
        "expert_shared_count": c.num_shared_experts,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": c.route_scale,
        "leading_dense_block_count": c.num_dense_layers,
        "attention.sliding_window": c.sliding_window,
    }


def laguna(c: Config) -> dict[str, Any]:
    full = c.rope_parameters[FULL]
    return {
        **sizes(c),
        **head_sizes(c),
        **experts(c),
        **expert_width(c),
        "attention.head_count": c.num_attention_heads_per_layer,
        "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": c.moe_routed_scaling_factor,
        "leading_dense_block_count": c.mlp_layer_types.count("dense"),
        "rope.freq_base": full["rope_theta"],
        "rope.dimension_count": int(c.head_dim * full["partial_rotary_factor"]),
    }


def laguna_with_windows(c: Config) -> dict[str, Any]:
    return {
        **laguna(c),
        "attention.sliding_window": c.sliding_window,
        "rope.freq_base_swa": c.rope_parameters[WINDOW]["rope_theta"],
        "rope.dimension_count_swa": c.head_dim,
    }


LAGUNA = {**DENSE, **SHARED_EXPERTS, "self_attn.g_proj.weight": "attn_gate.weight"}
HALF_ROTATED = {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5}

FAMILIES = [
    Family(
        "afmoe",
        "afmoe",
        "afmoe-q4_k_m.gguf",
        lambda: AfmoeConfig(
            **SIZES | SMALL_EXPERTS,
            num_hidden_layers=5,
            head_dim=24,
            num_dense_layers=3,
            num_shared_experts=1,
            route_scale=1.5,
            mup_enabled=True,
            sliding_window=12,
        ),
        afmoe,
        {
            **EMBEDDING,
            **ATTENTION,
            **GATED_FFN,
            **SHARED_EXPERTS,
            "self_attn.gate_proj.weight": "attn_gate.weight",
            "input_layernorm.weight": "attn_norm.weight",
            "post_attention_layernorm.weight": "post_attention_norm.weight",
            "pre_mlp_layernorm.weight": "ffn_norm.weight",
            "post_mlp_layernorm.weight": "post_ffw_norm.weight",
            "mlp.router.gate.weight": "ffn_gate_inp.weight",
            "mlp.expert_bias": "exp_probs_b.bias",
        },
    ),
    Family(
        "laguna",
        "laguna",
        "laguna-q4_k_m.gguf",
        lambda: LagunaConfig(
            **SIZES | SMALL_EXPERTS,
            num_hidden_layers=4,
            head_dim=24,
            num_attention_heads_per_layer=[4, 6, 6, 6],
            shared_expert_intermediate_size=56,
            moe_routed_scaling_factor=1.5,
            sliding_window=12,
            layer_types=[FULL, WINDOW, WINDOW, WINDOW],
            rope_parameters={
                FULL: HALF_ROTATED,
                WINDOW: {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 1.0,
                },
            },
        ),
        laguna_with_windows,
        LAGUNA,
    ),
    Family(
        "laguna-elements",
        "laguna",
        None,
        lambda: LagunaConfig(
            **SIZES | SMALL_EXPERTS,
            num_hidden_layers=2,
            head_dim=24,
            shared_expert_intermediate_size=40,
            gating="per-element",
            rope_parameters={FULL: HALF_ROTATED},
        ),
        laguna,
        LAGUNA,
    ),
]
