"""Mamba 2 alone, beside attention (Falcon-H1) and between attention and FFN layers (the others)."""

from typing import Any

import numpy as np
from transformers import FalconH1Config, GraniteMoeHybridConfig, Mamba2Config, NemotronHConfig

from tests.helpers.hf_models.family import Array, Change, Config, Family
from tests.helpers.hf_models.parts import (
    ATTENTION,
    EMBEDDING,
    FULL,
    NEIGHBOURS,
    NO_CONTEXT_LIMIT,
    PRE_NORMS,
    SIZES,
    experts,
    gate_and_up,
    granite_scales,
    head_sizes,
    renamed,
    rope_base,
    rope_size,
    sizes,
)

N_GROUPS = 2
DENSE_COLUMNS = 80


def mixer(prefix: str) -> dict[str, str | Change]:
    """Return the names of the parameters of a Mamba 2 layer with `N_GROUPS` groups."""
    changes: dict[str, str | Change] = {
        "A_log": renamed("ssm_a", lambda v: -np.exp(v)[:, None]),
        "D": renamed("ssm_d", lambda v: v[:, None]),
        "dt_bias": "ssm_dt.bias",
        "conv1d.weight": renamed("ssm_conv1d.weight", lambda v: v[:, 0]),
        "conv1d.bias": "ssm_conv1d.bias",
        "in_proj.weight": "ssm_in.weight",
        "norm.weight": renamed("ssm_norm.weight", lambda v: v.reshape(N_GROUPS, -1)),
        "out_proj.weight": "ssm_out.weight",
    }
    return {f"{prefix}.{name}": change for name, change in changes.items()}


def mamba2(c: Config) -> dict[str, Any]:
    return {
        "context_length": NO_CONTEXT_LIMIT,
        "embedding_length": c.hidden_size,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": c.num_hidden_layers,
        "ssm.conv_kernel": c.conv_kernel,
        "ssm.inner_size": c.num_heads * c.head_dim,
        "ssm.state_size": c.state_size,
        "ssm.time_step_rank": c.num_heads,
        "ssm.group_count": c.n_groups,
        "attention.layer_norm_rms_epsilon": c.layer_norm_epsilon,
        "vocab_size": c.vocab_size,
    }


def falcon_h1(c: Config) -> dict[str, Any]:
    return {
        **sizes(c),
        **head_sizes(c),
        **rope_base(c),
        "ssm.conv_kernel": c.mamba_d_conv,
        "ssm.inner_size": c.mamba_d_ssm,
        "ssm.state_size": c.mamba_d_state,
        "ssm.time_step_rank": c.mamba_n_heads,
        "ssm.group_count": c.mamba_n_groups,
    }


def scaled(name: str, *multipliers: str) -> Change:
    """Return a change that multiplies by the product of some entries of the configuration."""
    return lambda v, c: {name: v * np.prod([getattr(c, entry) for entry in multipliers])}


def scaled_input(values: Array, c: Config) -> dict[str, Array]:
    """Multiply the rows for z, x, B, C and dt by a multiplier each."""
    n_state = c.mamba_n_groups * c.mamba_d_state
    n_rows = [c.mamba_d_ssm, c.mamba_d_ssm, n_state, n_state, c.mamba_n_heads]
    rows = np.repeat(c.ssm_multipliers, n_rows)[:, None] * c.ssm_in_multiplier
    return {"ssm_in.weight": values * rows}


FALCON_H1: dict[str, str | Change] = {
    **mixer("mamba"),
    "mamba.norm.weight": renamed("ssm_norm.weight", lambda v: v[None]),
    "mamba.in_proj.weight": scaled_input,
    "mamba.out_proj.weight": scaled("ssm_out.weight", "ssm_out_multiplier"),
    "self_attn.q_proj.weight": scaled("attn_q.weight", "attention_in_multiplier"),
    "self_attn.k_proj.weight": scaled("attn_k.weight", "attention_in_multiplier", "key_multiplier"),
    "self_attn.v_proj.weight": scaled("attn_v.weight", "attention_in_multiplier"),
    "self_attn.o_proj.weight": scaled("attn_output.weight", "attention_out_multiplier"),
    "feed_forward.gate_proj.weight": lambda v, c: {"ffn_gate.weight": v * c.mlp_multipliers[0]},
    "feed_forward.up_proj.weight": "ffn_up.weight",
    "feed_forward.down_proj.weight": lambda v, c: {"ffn_down.weight": v * c.mlp_multipliers[1]},
    "input_layernorm.weight": "attn_norm.weight",
    "pre_ff_layernorm.weight": "ffn_norm",
    "model.embed_tokens.weight": scaled("token_embd.weight", "embedding_multiplier"),
    "model.final_layernorm.weight": "output_norm.weight",
    "lm_head.weight": scaled("output.weight", "lm_head_multiplier"),
}


def falcon_h1_config(**others: Any) -> FalconH1Config:
    return FalconH1Config(
        **SIZES,
        num_hidden_layers=2,
        head_dim=16,
        mamba_d_ssm=96,
        mamba_n_heads=6,
        mamba_d_state=24,
        mamba_norm_before_gate=False,
        lm_head_multiplier=1.2,
        embedding_multiplier=2.5,
        mlp_multipliers=[0.8, 1.4],
        key_multiplier=1.3,
        attention_in_multiplier=0.9,
        attention_out_multiplier=1.1,
        ssm_multipliers=[0.7, 1.2, 0.9, 1.3, 0.8],
        ssm_in_multiplier=1.1,
        ssm_out_multiplier=0.8,
        **others,
    )


def nemotron_h(c: Config) -> dict[str, Any]:
    kinds, n_ff = c.layer_types, {"mlp": c.intermediate_size, "moe": c.moe_intermediate_size}
    return {
        **sizes(c, eps="layer_norm_epsilon"),
        **head_sizes(c),
        **rope_size(c),
        "context_length": NO_CONTEXT_LIMIT,
        "attention.layer_norm_epsilon": c.layer_norm_epsilon,
        "feed_forward_length": [n_ff.get(kind, 0) for kind in kinds],
        "attention.head_count_kv": [c.num_key_value_heads if k == FULL else 0 for k in kinds],
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": c.conv_kernel,
        "ssm.state_size": c.ssm_state_size,
        "ssm.group_count": c.n_groups,
        "ssm.inner_size": c.mamba_num_heads * c.mamba_head_dim,
        "ssm.time_step_rank": c.mamba_num_heads,
    }


NEMOTRON_H: dict[str, str | Change] = {
    **EMBEDDING,
    **{theirs.replace("self_attn", "mixer"): ours for theirs, ours in ATTENTION.items()},
    **mixer("mixer"),
    "model.embeddings.weight": "token_embd.weight",
    "model.norm_f.weight": "output_norm.weight",
    "norm.weight": "attn_norm.weight",
    "mixer.up_proj.weight": "ffn_up.weight",
    "mixer.down_proj.weight": "ffn_down.weight",
}


def nemotron_h_moe(c: Config) -> dict[str, Any]:
    return {
        **nemotron_h(c),
        **experts(c),
        "expert_group_count": c.n_group,
        "expert_group_used_count": c.topk_group,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_feed_forward_length": c.moe_shared_expert_intermediate_size,
        "expert_shared_count": c.n_shared_experts,
        "expert_weights_norm": c.norm_topk_prob,
        "expert_weights_scale": c.routed_scaling_factor,
        **({"moe_latent_size": c.moe_latent_size} if c.moe_latent_size else {}),
    }


NEMOTRON_H_MOE: dict[str, str | Change] = {
    **NEMOTRON_H,
    "mixer.gate.weight": "ffn_gate_inp.weight",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj": "ffn_up_exps.weight",
    "mixer.experts.down_proj": "ffn_down_exps.weight",
    "mixer.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mixer.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "mixer.fc1_latent_proj.weight": "ffn_latent_down.weight",
    "mixer.fc2_latent_proj.weight": "ffn_latent_up.weight",
}


def nemotron_h_config(kind: str, **others: Any) -> NemotronHConfig:
    """Return a configuration of four layers, two of them of a given kind."""
    return NemotronHConfig(
        **SIZES,
        layers_block_type=["linear_attention", kind, FULL, kind],
        head_dim=24,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=24,
        n_groups=N_GROUPS,
        **others,
    )


def nemotron_h_moe_config(**others: Any) -> NemotronHConfig:
    return nemotron_h_config(
        "moe",
        n_routed_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=72,
        moe_shared_expert_intermediate_size=104,
        routed_scaling_factor=1.5,
        **others,
    )


def granite_hybrid(c: Config) -> dict[str, Any]:
    has_attention = [kind == FULL for kind in c.layer_types]
    return {
        **sizes(c),
        **rope_base(c),
        **rope_size(c),
        **experts(c),
        "context_length": NO_CONTEXT_LIMIT,
        "attention.head_count_kv": [c.num_key_value_heads if a else 0 for a in has_attention],
        **granite_scales(c),
        "feed_forward_length": c.intermediate_size if c.num_local_experts else DENSE_COLUMNS,
        "expert_shared_feed_forward_length": DENSE_COLUMNS,
        "rope.scaling.finetuned": c.position_embedding_type == "rope",
        "ssm.conv_kernel": c.mamba_d_conv,
        "ssm.state_size": c.mamba_d_state,
        "ssm.group_count": c.mamba_n_groups,
        "ssm.inner_size": c.mamba_n_heads * c.mamba_d_head,
        "ssm.time_step_rank": c.mamba_n_heads,
    }


def shared_gate_and_up(suffix: str) -> Change:
    """Return a change that splits gate and up of the expert that every token uses, or of an FFN."""

    def split(values: Array, _: Config) -> dict[str, Array]:
        gate, up = np.split(values, 2)
        return {f"ffn_gate{suffix}.weight": gate, f"ffn_up{suffix}.weight": up}

    return split


GRANITE_HYBRID: dict[str, str | Change] = {
    **EMBEDDING,
    **ATTENTION,
    **PRE_NORMS,
    **mixer("mamba"),
    "mamba.norm.weight": "ssm_norm.weight",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.experts.gate_up_proj": gate_and_up,
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
    "shared_mlp.input_linear.weight": shared_gate_and_up("_shexp"),
    "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
}

DENSE_FFN: dict[str, str | Change] = {
    "shared_mlp.input_linear.weight": shared_gate_and_up(""),
    "shared_mlp.output_linear.weight": "ffn_down.weight",
}


def granite_hybrid_config(**others: Any) -> GraniteMoeHybridConfig:
    return GraniteMoeHybridConfig(
        **SIZES,
        num_hidden_layers=2,
        layer_types=["mamba", "attention"],
        shared_intermediate_size=DENSE_COLUMNS,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=24,
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logits_scaling=2.0,
        **others,
    )


FAMILIES = [
    Family(
        "mamba2",
        "mamba2",
        "mamba2-q4_k_m.gguf",
        lambda: Mamba2Config(
            vocab_size=SIZES["vocab_size"],
            hidden_size=SIZES["hidden_size"],
            num_hidden_layers=3,
            num_heads=8,
            head_dim=16,
            state_size=24,
            n_groups=N_GROUPS,
        ),
        mamba2,
        {
            **mixer("mixer"),
            "backbone.embeddings.weight": "token_embd.weight",
            "norm.weight": "attn_norm.weight",
            "backbone.norm_f.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        },
    ),
    Family(
        "falcon-h1",
        "falcon-h1",
        "falcon-h1-q4_k_m.gguf",
        lambda: falcon_h1_config(mamba_rms_norm=True),
        falcon_h1,
        FALCON_H1,
    ),
    Family(
        "falcon-h1-gated-only",
        "falcon-h1",
        None,
        lambda: falcon_h1_config(mamba_rms_norm=False),
        falcon_h1,
        FALCON_H1,
    ),
    Family(
        "nemotron_h",
        "nemotron_h",
        "nemotron_h-q4_k_m.gguf",
        lambda: nemotron_h_config("mlp"),
        nemotron_h,
        NEMOTRON_H,
    ),
    Family(
        "nemotron_h_moe",
        "nemotron_h_moe",
        "nemotron_h_moe-q4_k_m.gguf",
        nemotron_h_moe_config,
        nemotron_h_moe,
        NEMOTRON_H_MOE,
    ),
    Family(
        "nemotron_h_moe-latent",
        "nemotron_h_moe",
        None,
        lambda: nemotron_h_moe_config(moe_latent_size=40),
        nemotron_h_moe,
        NEMOTRON_H_MOE,
    ),
    Family(
        "granitehybrid",
        "granitehybrid",
        "granitehybrid-q4_k_m.gguf",
        lambda: granite_hybrid_config(num_local_experts=5, num_experts_per_tok=2),
        granite_hybrid,
        GRANITE_HYBRID,
    ),
    Family(
        "granitehybrid-dense",
        "granitehybrid",
        None,
        lambda: granite_hybrid_config(
            num_local_experts=0, num_experts_per_tok=0, position_embedding_type="rope"
        ),
        granite_hybrid,
        GRANITE_HYBRID | NEIGHBOURS | DENSE_FFN,
    ),
]
