"""Llama and its closest relatives."""

from typing import Any

import numpy as np
from transformers import (
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.helpers.hf_models.family import Array, Config, Family
from tests.helpers.hf_models.parts import (
    ATTENTION,
    DENSE,
    EMBEDDING,
    EXPERTS,
    GATED_FFN,
    NEIGHBOURS,
    PRE_NORMS,
    SIZES,
    expert_width,
    experts,
    granite_scales,
    head_sizes,
    rope_base,
    rope_size,
    sizes,
)

HEADS = {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama3_divisors(c: Config) -> dict[str, Array]:
    """Return divisors of the frequencies: the factor for long waves, 1 for short, or a blend.

    Source: Llama 3.1's `rope_type: llama3`.
    """
    rope = c.rope_parameters
    base, n_ctx = rope["rope_theta"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = n_ctx / (2 * np.pi) * base ** -(np.arange(0, c.head_dim, 2) / c.head_dim)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": 1 / ((1 - kept) / rope["factor"] + kept)}


def granite(c: Config) -> dict[str, Any]:
    return {**sizes(c), **rope_base(c), **rope_size(c), **granite_scales(c)}


def phi3(c: Config) -> dict[str, Any]:
    return {
        **sizes(c),
        **rope_base(c),
        **rope_size(c),
        "rope.scaling.original_context_length": c.original_max_position_embeddings,
        "attention.sliding_window": 0,
    }


PHI3 = {
    **EMBEDDING,
    **PRE_NORMS,
    "self_attn.qkv_proj.weight": "attn_qkv.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}

FAMILIES = [
    Family(
        "llama",
        "llama",
        "llama-llama3rope-q5_k_s.gguf",
        lambda: LlamaConfig(
            **SIZES | HEADS, num_hidden_layers=3, rope_parameters=LLAMA3, tie_word_embeddings=True
        ),
        lambda c: {**sizes(c), **head_sizes(c), **rope_base(c), **rope_size(c)},
        {**DENSE, **NEIGHBOURS},
        llama3_divisors,
    ),
    Family(
        "qwen2",
        "qwen2",
        "qwen2-q4_k_m.gguf",
        lambda: Qwen2Config(**SIZES, num_hidden_layers=3),
        lambda c: {**sizes(c), **rope_base(c)},
        DENSE,
    ),
    Family(
        "qwen3",
        "qwen3",
        "qwen3-q4_k_m.gguf",
        lambda: Qwen3Config(**SIZES | HEADS, num_hidden_layers=2, tie_word_embeddings=True),
        lambda c: {**sizes(c), **head_sizes(c), **rope_base(c)},
        DENSE,
    ),
    Family(
        "mixtral",
        "llama",
        "mixtral-q4_k_m.gguf",
        lambda: MixtralConfig(**SIZES, num_hidden_layers=2, num_local_experts=4),
        lambda c: {**sizes(c), **rope_base(c), **rope_size(c), **experts(c)},
        {**EMBEDDING, **ATTENTION, **PRE_NORMS, **NEIGHBOURS, **EXPERTS},
    ),
    Family(
        "qwen3moe",
        "qwen3moe",
        "qwen3moe-q4_k_m.gguf",
        lambda: Qwen3MoeConfig(
            **SIZES | HEADS,
            num_hidden_layers=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            norm_topk_prob=True,
        ),
        lambda c: {**sizes(c), **head_sizes(c), **rope_base(c), **experts(c), **expert_width(c)},
        {**EMBEDDING, **ATTENTION, **PRE_NORMS, **EXPERTS},
    ),
    Family(
        "olmo2",
        "olmo2",
        "olmo2-q4_k_m.gguf",
        lambda: Olmo2Config(**SIZES, num_hidden_layers=2),
        lambda c: {**sizes(c), **rope_base(c)},
        {
            **EMBEDDING,
            **ATTENTION,
            **GATED_FFN,
            "post_attention_layernorm.weight": "post_attention_norm.weight",
            "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
        },
    ),
    Family(
        "granite",
        "granite",
        "granite-q4_k_m.gguf",
        lambda: GraniteConfig(
            **SIZES,
            num_hidden_layers=2,
            embedding_multiplier=3.0,
            attention_multiplier=0.3,
            residual_multiplier=0.6,
            logits_scaling=1.5,
        ),
        granite,
        {**DENSE, **NEIGHBOURS},
    ),
    Family(
        "phi3",
        "phi3",
        "phi3-q4_k_m.gguf",
        lambda: Phi3Config(**SIZES, num_hidden_layers=2, original_max_position_embeddings=256),
        phi3,
        PHI3,
    ),
]
