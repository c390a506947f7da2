"""Gemma 2, 3 and 4: norms after the blocks too, sliding windows, capped logits."""

from typing import Any

import numpy as np
from transformers import Gemma2Config, Gemma3TextConfig, Gemma4TextConfig, GemmaConfig

from tests.helpers.hf_models.family import Array, Change, Config, Family
from tests.helpers.hf_models.parts import (
    ATTENTION,
    EMBEDDING,
    FULL,
    GATED_FFN,
    PRE_NORMS,
    SIZES,
    WINDOW,
    full_yarn,
    head_sizes,
    plus_one,
    rope_size,
    sizes,
)

HEADS = {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 12}

POST_NORMS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}

NORMS_PLUS_ONE = plus_one(
    {
        **POST_NORMS,
        "model.norm.weight": "output_norm.weight",
        "self_attn.q_norm.weight": "attn_q_norm.weight",
        "self_attn.k_norm.weight": "attn_k_norm.weight",
    }
)

GEMMA: dict[str, str | Change] = {**EMBEDDING, **ATTENTION, **GATED_FFN, **NORMS_PLUS_ONE}

GEMMA4: dict[str, str | Change] = {
    **EMBEDDING,
    **ATTENTION,
    **GATED_FFN,
    **POST_NORMS,
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
}


def gemma(c: Config) -> dict[str, Any]:
    return {**sizes(c), **head_sizes(c)}


def gemma2(c: Config) -> dict[str, Any]:
    return {
        **gemma(c),
        "attn_logit_softcapping": c.attn_logit_softcapping,
        "final_logit_softcapping": c.final_logit_softcapping,
        "attention.sliding_window": c.sliding_window,
    }


def gemma3(c: Config) -> dict[str, Any]:
    rope = c.rope_parameters
    return {
        **gemma(c),
        "attention.sliding_window": c.sliding_window,
        "rope.freq_base": rope[FULL]["rope_theta"],
        "rope.freq_base_swa": rope[WINDOW]["rope_theta"],
        "rope.scaling.type": "linear",
        "rope.scaling.factor": rope[FULL]["factor"],
    }


def rnj(c: Config) -> dict[str, Any]:
    """Return the keys of Rnj-1, a Gemma 3 without windows, stretched by YaRN."""
    return {**gemma(c), **full_yarn(c), "final_logit_softcapping": c.final_logit_softcapping}


def gemma4_config(layer_types: str, **changes: Any) -> Config:
    """Return a configuration with a layer per letter: s (sliding window) or f (full attention)."""
    kinds = {"s": WINDOW, "f": FULL}
    values: dict[str, Any] = {
        "num_hidden_layers": len(layer_types),
        "layer_types": [kinds[letter] for letter in layer_types],
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 12,
        "final_logit_softcapping": 5.0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": SIZES["vocab_size"],
    }
    return Gemma4TextConfig(**SIZES | values | changes)


def gemma4(c: Config) -> dict[str, Any]:
    rope = c.rope_parameters
    first, last = c.per_layer_config[0], c.per_layer_config[c.num_hidden_layers - 1]
    return {
        **sizes(first),
        **head_sizes(last),
        **rope_size(last),
        "attention.key_length_swa": first.head_dim,
        "attention.value_length_swa": first.head_dim,
        "rope.dimension_count_swa": first.head_dim,
        "rope.freq_base": rope[FULL]["rope_theta"],
        "rope.freq_base_swa": rope[WINDOW]["rope_theta"],
        "attention.sliding_window": c.sliding_window,
        "attention.sliding_window_pattern": [k == WINDOW for k in c.layer_types],
        "attention.shared_kv_layers": c.num_kv_shared_layers,
        "embedding_length_per_layer_input": c.hidden_size_per_layer_input,
        "final_logit_softcapping": c.final_logit_softcapping,
    }


def kv_heads_by_layer(c: Config) -> dict[str, Any]:
    layers = [c.per_layer_config[layer] for layer in range(c.num_hidden_layers)]
    return {"attention.head_count_kv": [layer.num_key_value_heads for layer in layers]}


def gemma4_moe(c: Config) -> dict[str, Any]:
    return {
        **gemma4(c),
        **kv_heads_by_layer(c),
        "expert_count": c.num_experts,
        "expert_used_count": c.top_k_experts,
        "expert_feed_forward_length": c.moe_intermediate_size,
    }


def gemma4_small(c: Config) -> dict[str, Any]:
    n_own = c.num_hidden_layers - c.num_kv_shared_layers
    widths = [c.intermediate_size] * n_own + [2 * c.intermediate_size] * c.num_kv_shared_layers
    return {**gemma4(c), "feed_forward_length": widths}


def quarter_of_pairs(c: Config) -> dict[str, Array]:
    """Return divisors of the frequencies in full layers, huge for pairs that are not rotated."""
    n_pairs = c.per_layer_config[c.num_hidden_layers - 1].head_dim // 2
    part = c.rope_parameters[FULL]["partial_rotary_factor"]
    return {"rope_freqs.weight": np.where(np.arange(n_pairs) < part * n_pairs, 1, 1e30)}


FAMILIES = [
    Family(
        "gemma",
        "gemma",
        "gemma1-q4_k_m.gguf",
        lambda: GemmaConfig(**SIZES, num_hidden_layers=2, head_dim=24),
        gemma,
        GEMMA | plus_one(PRE_NORMS),
    ),
    Family(
        "gemma3",
        "gemma3",
        "gemma3-q4_0.gguf",
        lambda: Gemma3TextConfig(
            **SIZES | HEADS,
            num_hidden_layers=6,
            rope_parameters={
                WINDOW: {"rope_type": "default", "rope_theta": 1e4},
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        ),
        gemma3,
        GEMMA,
    ),
    Family(
        "gemma2",
        "gemma2",
        "gemma2-q4_k_m.gguf",
        lambda: Gemma2Config(
            **SIZES | HEADS,
            num_hidden_layers=2,
            attn_logit_softcapping=4.0,
            final_logit_softcapping=5.0,
        ),
        gemma2,
        GEMMA,
    ),
    Family(
        "gemma2-27b",
        "gemma2",
        "gemma2-q4_k_m.gguf",
        lambda: Gemma2Config(
            **SIZES | HEADS | {"query_pre_attn_scalar": 16},
            num_hidden_layers=46,
            attn_logit_softcapping=4.0,
            final_logit_softcapping=5.0,
        ),
        gemma2,
        GEMMA,
    ),
    Family(
        "rnj-1",
        "gemma3",
        None,
        lambda: Gemma3TextConfig(
            **SIZES | HEADS,
            num_hidden_layers=2,
            layer_types=[FULL] * 2,
            final_logit_softcapping=5.0,
            rope_parameters={
                WINDOW: {"rope_type": "default", "rope_theta": 1e4},
                FULL: {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
            },
        ),
        rnj,
        GEMMA,
    ),
    Family(
        "gemma4",
        "gemma4",
        "gemma4-dense-q4_k_m.gguf",
        lambda: gemma4_config("sssf", num_global_key_value_heads=1, attention_k_eq_v=True),
        lambda c: {**gemma4(c), **kv_heads_by_layer(c)},
        GEMMA4,
        quarter_of_pairs,
    ),
    Family(
        "gemma4-shared-kv",
        "gemma4",
        "gemma4-e2b-q5_1.gguf",
        lambda: gemma4_config(
            "ssfssf",
            num_key_value_heads=1,
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=24,
        ),
        gemma4_small,
        GEMMA4,
        quarter_of_pairs,
    ),
    Family(
        "gemma4-moe",
        "gemma4",
        "gemma4-moe-q4_k_m.gguf",
        lambda: gemma4_config(
            "ssf",
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=40,
        ),
        gemma4_moe,
        GEMMA4,
        quarter_of_pairs,
    ),
]
