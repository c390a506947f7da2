"""Mistral's models: latent attention with other factors than DeepSeek's, and variants of YaRN."""

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    MiniCPM3Config,
    Ministral3Config,
    Mistral4Config,
    Mistral4ForCausalLM,
)

from tests.helpers.hf_models.family import Config, Family
from tests.helpers.hf_models.moe import MLA, YARN, mla_sizes
from tests.helpers.hf_models.parts import (
    DENSE,
    EMBEDDING,
    GATED_FFN,
    NEIGHBOURS,
    PRE_NORMS,
    SHARED_EXPERTS,
    SIZES,
    expert_width,
    experts,
    head_sizes,
    rope_base,
    rope_size,
    shared_experts,
    sizes,
    yarn,
)

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

LATENT_SIZES = SIZES | {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
}


def ministral3(c: Config) -> dict[str, Any]:
    return {
        **sizes(c),
        **head_sizes(c),
        **rope_base(c),
        **rope_size(c),
        **yarn(c),
        "rope.scaling.yarn_log_multiplier": c.rope_parameters["mscale_all_dim"],
        "attention.temperature_scale": c.rope_parameters["llama_4_scaling_beta"],
    }


def mistral4(c: Config) -> dict[str, Any]:
    found = {
        **sizes(c),
        **rope_base(c),
        **yarn(c),
        **mla_sizes(c),
        **experts(c),
        **expert_width(c),
        **shared_experts(c),
        "leading_dense_block_count": c.first_k_dense_replace,
        "attention.q_lora_rank": c.q_lora_rank,
        "rope.scaling.yarn_log_multiplier": 0.1 * c.rope_parameters["mscale_all_dim"],
    }
    del found["expert_gating_func"]
    return found


def minicpm3(c: Config) -> dict[str, Any]:
    return {
        **sizes(c),
        "attention.q_lora_rank": c.q_lora_rank,
        "attention.kv_lora_rank": c.kv_lora_rank,
        "attention.key_length": c.qk_head_dim,
        "rope.dimension_count": c.qk_rope_head_dim,
    }


FAMILIES = [
    Family(
        "ministral3",
        "mistral3",
        "ministral3-q4_k_m.gguf",
        lambda: Ministral3Config(
            **SIZES,
            num_hidden_layers=2,
            head_dim=24,
            rope_parameters=YARN
            | {
                "original_max_position_embeddings": 16,
                "beta_fast": 2.0,
                "beta_slow": 0.5,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "llama_4_scaling_beta": 0.1,
            },
        ),
        ministral3,
        {**DENSE, **NEIGHBOURS},
    ),
    Family(
        "mistral4",
        "mistral4",
        "mistral4-q4_k_m.gguf",
        lambda: Mistral4Config(
            **LATENT_SIZES,
            num_hidden_layers=2,
            v_head_dim=20,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            rope_parameters=YARN
            | {"mscale": 1.0, "mscale_all_dim": 0.8, "llama_4_scaling_beta": 0.1},
        ),
        mistral4,
        {
            **EMBEDDING,
            **MLA,
            **PRE_NORMS,
            **SHARED_EXPERTS,
            "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
        },
    ),
    Family(
        "minicpm3",
        "minicpm3",
        "minicpm3-q4_0.gguf",
        lambda: MiniCPM3Config(**LATENT_SIZES, num_hidden_layers=2),
        minicpm3,
        {
            **EMBEDDING,
            **MLA,
            **GATED_FFN,
            **PRE_NORMS,
            "self_attn.kv_b_proj.weight": "attn_kv_b.weight",
        },
    ),
]
