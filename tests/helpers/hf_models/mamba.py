"""Mamba 1 alone, with normalised steps (Falcon Mamba), and with attention and experts (Jamba)."""

from typing import Any

import numpy as np
from transformers import FalconMambaConfig, JambaConfig, MambaConfig

from tests.helpers.hf_models.family import Change, Config, Family
from tests.helpers.hf_models.parts import (
    ATTENTION,
    EMBEDDING,
    FULL,
    NO_CONTEXT_LIMIT,
    SIZES,
    gate_and_up,
    renamed,
    sizes,
)


def mixer(prefix: str) -> dict[str, str | Change]:
    """Return the names of the parameters of a Mamba 1 layer."""
    changes: dict[str, str | Change] = {
        "A_log": renamed("ssm_a", lambda v: -np.exp(v)),
        "D": "ssm_d",
        "conv1d.weight": renamed("ssm_conv1d.weight", lambda v: v[:, 0]),
        "conv1d.bias": "ssm_conv1d.bias",
        "in_proj.weight": "ssm_in.weight",
        "x_proj.weight": "ssm_x.weight",
        "dt_proj.weight": "ssm_dt.weight",
        "dt_proj.bias": "ssm_dt.bias",
        "dt_layernorm.weight": "ssm_dt_norm.weight",
        "b_layernorm.weight": "ssm_b_norm.weight",
        "c_layernorm.weight": "ssm_c_norm.weight",
        "out_proj.weight": "ssm_out.weight",
    }
    return {f"{prefix}.{name}": change for name, change in changes.items()}


def mamba(c: Config, *, has_norms: bool = False) -> dict[str, Any]:
    return {
        "context_length": NO_CONTEXT_LIMIT,
        "embedding_length": c.hidden_size,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": c.num_hidden_layers,
        "ssm.conv_kernel": c.conv_kernel,
        "ssm.inner_size": c.intermediate_size,
        "ssm.state_size": c.state_size,
        "ssm.time_step_rank": c.time_step_rank,
        "attention.layer_norm_rms_epsilon": c.layer_norm_epsilon,
        "ssm.dt_b_c_rms": has_norms,
        "vocab_size": c.vocab_size,
    }


MAMBA: dict[str, str | Change] = {
    **mixer("mixer"),
    "backbone.embeddings.weight": "token_embd.weight",
    "norm.weight": "attn_norm.weight",
    "backbone.norm_f.weight": "output_norm.weight",
}

MAMBA_SIZES: dict[str, Any] = {
    "vocab_size": SIZES["vocab_size"],
    "hidden_size": 72,  # twice as many channels: the last unit of 32 is a short one
    "num_hidden_layers": 3,
    "state_size": 9,
    "layer_norm_epsilon": 1e-5,
}


def jamba(c: Config) -> dict[str, Any]:
    has_attention = [kind == FULL for kind in c.layer_types]
    return {
        **sizes(c),
        "attention.head_count_kv": [c.num_key_value_heads if a else 0 for a in has_attention],
        "ssm.conv_kernel": c.mamba_d_conv,
        "ssm.inner_size": c.mamba_expand * c.hidden_size,
        "ssm.state_size": c.mamba_d_state,
        "ssm.time_step_rank": c.mamba_dt_rank,
        "expert_count": c.num_experts,
        "expert_used_count": c.num_experts_per_tok,
    }


JAMBA: dict[str, str | Change] = {
    **EMBEDDING,
    **ATTENTION,
    **mixer("mamba"),
    "feed_forward.gate_proj.weight": "ffn_gate.weight",
    "feed_forward.up_proj.weight": "ffn_up.weight",
    "feed_forward.down_proj.weight": "ffn_down.weight",
    "feed_forward.router.weight": "ffn_gate_inp.weight",
    "feed_forward.experts.gate_up_proj": gate_and_up,
    "feed_forward.experts.down_proj": "ffn_down_exps.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "pre_ff_layernorm.weight": "ffn_norm.weight",
    "model.final_layernorm.weight": "output_norm.weight",
}


def jamba_config(**others: Any) -> JambaConfig:
    """Return a configuration with experts (if any) in the second layer, attention in the third."""
    return JambaConfig(
        **SIZES,
        num_hidden_layers=3,
        attn_layer_period=3,
        attn_layer_offset=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=9,
        **others,
    )


FAMILIES = [
    Family("mamba", "mamba", "mamba-q5_0.gguf", lambda: MambaConfig(**MAMBA_SIZES), mamba, MAMBA),
    Family(
        "falcon-mamba",
        "mamba",
        "mamba-q5_0.gguf",
        lambda: FalconMambaConfig(**MAMBA_SIZES, mixer_rms_eps=1e-5),
        lambda c: mamba(c, has_norms=True),
        MAMBA,
    ),
    Family(
        "jamba",
        "jamba",
        "jamba-q4_k_m.gguf",
        lambda: jamba_config(num_experts=5, num_experts_per_tok=2),
        jamba,
        JAMBA,
    ),
    Family(
        "jamba-dense",
        "jamba",
        None,
        lambda: jamba_config(num_experts=1, num_experts_per_tok=1),
        jamba,
        JAMBA,
    ),
]
