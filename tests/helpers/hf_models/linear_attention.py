"""Gated delta networks: Qwen3-Next, Qwen3.5 and Kimi Linear."""

from typing import Any

import numpy as np
from transformers import KimiLinearConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

from tests.helpers.hf_models.family import Array, Change, Config, Family
from tests.helpers.hf_models.moe import MLA, mla_sizes
from tests.helpers.hf_models.parts import (
    ATTENTION,
    EMBEDDING,
    EXPERTS,
    FULL,
    GATED_FFN,
    PRE_NORMS,
    SHARED_EXPERTS,
    SIZES,
    expert_width,
    experts,
    head_sizes,
    plus_one,
    renamed,
    rope_base,
    rope_size,
    shared_experts,
    sizes,
)

LINEAR = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", FULL],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 24,
}

MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}

ROPE = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}

MROPE = ROPE | {"mrope_section": [3, 3, 2]}

QWEN: dict[str, str | Change] = {
    **EMBEDDING,
    **ATTENTION,
    **plus_one(
        {
            "input_layernorm.weight": "attn_norm.weight",
            "post_attention_layernorm.weight": "post_attention_norm.weight",
            "model.norm.weight": "output_norm.weight",
            "self_attn.q_norm.weight": "attn_q_norm.weight",
            "self_attn.k_norm.weight": "attn_k_norm.weight",
        }
    ),
    "linear_attn.norm.weight": "ssm_norm.weight",
}

QWEN_EXPERTS: dict[str, str | Change] = {
    **EXPERTS,
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    **{
        f"mlp.shared_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight"
        for part in ("gate", "up", "down")
    },
}


def linear_sizes(c: Config) -> dict[str, Any]:
    return {
        **head_sizes(c),
        **rope_base(c),
        **rope_size(c, c.rope_parameters["partial_rotary_factor"]),
        "ssm.conv_kernel": c.linear_conv_kernel_dim,
        "ssm.state_size": c.linear_key_head_dim,
        "ssm.group_count": c.linear_num_key_heads,
        "ssm.time_step_rank": c.linear_num_value_heads,
        "ssm.inner_size": c.linear_num_value_heads * c.linear_value_head_dim,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in c.layer_types],
        "full_attention_interval": 4,
    }


def expert_sizes(c: Config) -> dict[str, Any]:
    return {
        "expert_count": c.num_experts,
        "expert_used_count": c.num_experts_per_tok,
        **expert_width(c),
        "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
    }


def queries_to_gates(values: Array, c: Config) -> dict[str, Array]:
    """Sort rows that lie per key head as q, k, v and gate z into all q, all k, all v, and all z."""
    n_v = c.linear_num_value_heads // c.linear_num_key_heads * c.linear_value_head_dim
    ends = np.cumsum([c.linear_key_head_dim, c.linear_key_head_dim, n_v])
    heads = values.reshape(c.linear_num_key_heads, -1, c.hidden_size)
    parts = [part.reshape(-1, c.hidden_size) for part in np.split(heads, ends, axis=1)]
    return {"attn_qkv.weight": np.concatenate(parts[:3]), "attn_gate.weight": parts[3]}


QWEN3_NEXT: dict[str, str | Change] = {
    **QWEN,
    **QWEN_EXPERTS,
    "linear_attn.A_log": renamed("ssm_a", lambda v: -np.exp(v)),
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d.weight": renamed("ssm_conv1d.weight", lambda v: v[:, 0]),
    "linear_attn.in_proj_qkvz.weight": queries_to_gates,
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}


def tiled(values: Array, c: Config, head_dim: int) -> Array:
    """Reorder the rows of value heads: from all of one key head together to one of each in turn."""
    heads = values.reshape(c.linear_num_key_heads, -1, head_dim, *values.shape[1:])
    return heads.swapaxes(0, 1).reshape(values.shape)


def tiled_heads(name: str, change: Any = np.asarray) -> Change:
    """Return a change that reorders value heads of one row each."""
    return lambda values, c: {name: tiled(change(values), c, 1)}


def tiled_tail(name: str) -> Change:
    """Return a change that reorders the value heads behind the rows of queries and keys."""

    def change(values: Array, c: Config) -> dict[str, Array]:
        n_qk = 2 * c.linear_num_key_heads * c.linear_key_head_dim
        values = values.reshape(len(values), -1)
        v = tiled(values[n_qk:], c, c.linear_value_head_dim)
        return {name: np.concatenate([values[:n_qk], v])}

    return change


QWEN3_5: dict[str, str | Change] = {
    **QWEN,
    "linear_attn.A_log": tiled_heads("ssm_a", lambda v: -np.exp(v)),
    "linear_attn.dt_bias": tiled_heads("ssm_dt.bias"),
    "linear_attn.in_proj_a.weight": tiled_heads("ssm_alpha.weight"),
    "linear_attn.in_proj_b.weight": tiled_heads("ssm_beta.weight"),
    "linear_attn.conv1d.weight": tiled_tail("ssm_conv1d.weight"),
    "linear_attn.in_proj_qkv.weight": tiled_tail("attn_qkv.weight"),
    "linear_attn.in_proj_z.weight": lambda v, c: {
        "attn_gate.weight": tiled(v, c, c.linear_value_head_dim)
    },
    "linear_attn.out_proj.weight": lambda v, c: {
        "ssm_out.weight": tiled(v.T, c, c.linear_value_head_dim).T
    },
}


def qwen3_5(c: Config) -> dict[str, Any]:
    sections = [*c.rope_parameters["mrope_section"], 0]
    return {**sizes(c), **linear_sizes(c), "rope.dimension_sections": sections}


def kimi(c: Config) -> dict[str, Any]:
    router = shared_experts(c)
    del router["expert_weights_norm"], router["expert_group_count"]
    is_full = [kind == FULL for kind in c.layer_types]
    return {
        **sizes(c),
        **mla_sizes(c),
        **experts(c),
        **expert_width(c),
        **router,
        "leading_dense_block_count": 1,
        "attention.head_count_kv": [int(full) for full in is_full],
        "attention.value_length": c.head_dim,  # of no meaning here, as in converted files
        "ssm.conv_kernel": c.linear_conv_kernel_dim,
        "kda.head_dim": c.linear_head_dim,
    }


def three_convolutions(values: Array, _: Config) -> dict[str, Array]:
    """Split the kernel of queries, keys and values, (3 channels, 1, K), in three with four axes."""
    return {
        f"ssm_conv1d_{letter}.weight": part[None]
        for letter, part in zip("qkv", np.split(values, 3), strict=True)
    }


KIMI: dict[str, str | Change] = {
    **EMBEDDING,
    **ATTENTION,
    **MLA,
    **GATED_FFN,
    **PRE_NORMS,
    **SHARED_EXPERTS,
    "self_attn.conv1d.weight": three_convolutions,
    "self_attn.forget_gate.A_log": renamed("ssm_a", lambda v: -np.exp(v)),
    "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
    "self_attn.forget_gate.f_a_proj.weight": "ssm_f_a.weight",
    "self_attn.forget_gate.f_b_proj.weight": "ssm_f_b.weight",
    "self_attn.g_a_proj.weight": "ssm_g_a.weight",
    "self_attn.g_b_proj.weight": "ssm_g_b.weight",
    "self_attn.b_proj.weight": "ssm_beta.weight",
    "self_attn.o_norm.weight": "ssm_norm.weight",
}

FAMILIES = [
    Family(
        "qwen3next",
        "qwen3next",
        "qwen3next-q4_k_m.gguf",
        lambda: Qwen3NextConfig(**SIZES | LINEAR | MOE, rope_parameters=ROPE),
        lambda c: {**sizes(c), **linear_sizes(c), **expert_sizes(c)},
        QWEN3_NEXT,
    ),
    Family(
        "qwen35",
        "qwen35",
        "qwen35-q4_k_m.gguf",
        lambda: Qwen3_5TextConfig(**SIZES | LINEAR, rope_parameters=MROPE),
        qwen3_5,
        {**QWEN3_5, **GATED_FFN},
    ),
    Family(
        "qwen35moe",
        "qwen35moe",
        "qwen35moe-q4_k_m.gguf",
        lambda: Qwen3_5MoeTextConfig(**SIZES | LINEAR | MOE, rope_parameters=MROPE),
        lambda c: {**qwen3_5(c), **expert_sizes(c)},
        {**QWEN3_5, **QWEN_EXPERTS},
    ),
    Family(
        "kimi-linear",
        "kimi-linear",
        "kimi-linear-q4_k_m.gguf",
        lambda: KimiLinearConfig(
            **SIZES | {"num_key_value_heads": 4},
            num_hidden_layers=3,
            layer_types=LINEAR["layer_types"],
            first_k_dense_replace=1,
            linear_num_heads=4,
            linear_head_dim=24,
            kv_lora_rank=32,
            qk_nope_head_dim=24,
            qk_rope_head_dim=16,
            v_head_dim=20,
            num_local_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            n_group=1,
        ),
        kimi,
        KIMI,
    ),
]
