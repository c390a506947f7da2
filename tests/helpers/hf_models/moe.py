"""Routed experts with a router, attention or activation of their own: gpt-oss, GLM, DeepSeek."""

from typing import Any

from transformers import DeepseekV3Config, Glm4MoeConfig, GptOssConfig

from tests.helpers.hf_models.family import Array, Change, Config, Family
from tests.helpers.hf_models.parts import (
    ATTENTION,
    DENSE,
    EMBEDDING,
    GATED_FFN,
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

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

NORM_AFTER_ATTENTION = {"post_attention_layernorm.weight": "post_attention_norm.weight"}


def gpt_oss(c: Config) -> dict[str, Any]:
    return {
        **sizes(c),
        **head_sizes(c),
        **rope_base(c),
        **yarn(c),
        **experts(c),
        "expert_feed_forward_length": c.intermediate_size,
        "attention.sliding_window": c.sliding_window,
    }


def alternating(values: Array, _: Config) -> dict[str, Array]:
    """Split alternating gate and up columns; matrices (E, in, out) are transposed."""
    kind = "weight" if values.ndim == 3 else "bias"
    outputs_first = values.swapaxes(1, 2) if kind == "weight" else values
    return {
        f"ffn_gate_exps.{kind}": outputs_first[:, 0::2],
        f"ffn_up_exps.{kind}": outputs_first[:, 1::2],
    }


def glm4_moe(c: Config) -> dict[str, Any]:
    return {
        **sizes(c),
        **head_sizes(c),
        **rope_base(c),
        **rope_size(c, c.rope_parameters["partial_rotary_factor"]),
        **experts(c),
        **expert_width(c),
        **shared_experts(c),
        "leading_dense_block_count": c.first_k_dense_replace,
    }


def mla_sizes(c: Config) -> dict[str, Any]:
    """Return the keys of latent attention: one key-value head of latent and rotated part."""
    return {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": c.kv_lora_rank,
        "attention.key_length": c.kv_lora_rank + c.qk_rope_head_dim,
        "attention.value_length": c.kv_lora_rank,
        "attention.key_length_mla": c.qk_nope_head_dim + c.qk_rope_head_dim,
        "attention.value_length_mla": c.v_head_dim,
        "rope.dimension_count": c.qk_rope_head_dim,
    }


def deepseek(c: Config) -> dict[str, Any]:
    return {
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


def absorbed(values: Array, c: Config) -> dict[str, Array]:
    """Split the matrix from latent to keys (transposed, to apply to queries) and values."""
    heads = values.reshape(c.num_attention_heads, -1, c.kv_lora_rank)
    return {
        "attn_k_b.weight": heads[:, : c.qk_nope_head_dim].swapaxes(1, 2),
        "attn_v_b.weight": heads[:, c.qk_nope_head_dim :],
    }


MLA: dict[str, str | Change] = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.kv_b_proj.weight": absorbed,
    "self_attn.o_proj.weight": "attn_output.weight",
}

FAMILIES = [
    Family(
        "gpt-oss",
        "gpt-oss",
        "gptoss-mxfp4.gguf",
        lambda: GptOssConfig(
            **SIZES,
            num_hidden_layers=3,
            head_dim=24,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=12,
            rope_parameters=YARN | {"rope_theta": 150000.0, "factor": 32.0, "truncate": True},
        ),
        gpt_oss,
        {
            **EMBEDDING,
            **ATTENTION,
            **PRE_NORMS,
            **NORM_AFTER_ATTENTION,
            "self_attn.sinks": "attn_sinks.weight",
            "mlp.router.weight": "ffn_gate_inp.weight",
            "mlp.router.bias": "ffn_gate_inp.bias",
            "mlp.experts.gate_up_proj": alternating,
            "mlp.experts.gate_up_proj_bias": alternating,
            "mlp.experts.down_proj": lambda v, _: {"ffn_down_exps.weight": v.swapaxes(1, 2)},
            "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
        },
    ),
    Family(
        "glm4moe",
        "glm4moe",
        "glm4moe-q4_k_m.gguf",
        lambda: Glm4MoeConfig(
            **SIZES,
            num_hidden_layers=2,
            head_dim=24,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            routed_scaling_factor=1.5,
            attention_bias=True,
            use_qk_norm=True,
        ),
        glm4_moe,
        {**DENSE, **NORM_AFTER_ATTENTION, **SHARED_EXPERTS},
    ),
    Family(
        "deepseek2",
        "deepseek2",
        "deepseek3-mla-q4_k_m.gguf",
        lambda: DeepseekV3Config(
            **SIZES | {"num_key_value_heads": 4},
            num_hidden_layers=2,
            q_lora_rank=40,
            kv_lora_rank=32,
            qk_nope_head_dim=24,
            qk_rope_head_dim=16,
            v_head_dim=20,
            n_routed_experts=6,
            num_experts_per_tok=2,
            n_group=3,
            topk_group=2,
            first_k_dense_replace=1,
            moe_intermediate_size=40,
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        deepseek,
        {**EMBEDDING, **MLA, **GATED_FFN, **PRE_NORMS, **SHARED_EXPERTS},
    ),
]
