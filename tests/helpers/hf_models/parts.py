"""Names, keys and changes that many families share."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.helpers.hf_models.family import Array, Change, Config

SIZES: dict[str, Any] = {
    "vocab_size": 141,
    "hidden_size": 64,
    "intermediate_size": 104,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Configuration of most families; neither the vocabulary nor the FFN divides evenly."""

FULL, WINDOW = "full_attention", "sliding_attention"
"""Names in configurations of layers that see all tokens, or only the latest."""

NO_CONTEXT_LIMIT = 1 << 20
"""Context length that converters write for a model without a limit."""

EMBEDDING = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}

ATTENTION = {
    f"self_attn.{theirs}.{kind}": f"attn_{ours}.{kind}"
    for theirs, ours in (
        ("q_proj", "q"),
        ("k_proj", "k"),
        ("v_proj", "v"),
        ("o_proj", "output"),
        ("q_norm", "q_norm"),
        ("k_norm", "k_norm"),
    )
    for kind in ("weight", "bias")
}

GATED_FFN = {f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")}

PRE_NORMS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}

DENSE = {**EMBEDDING, **ATTENTION, **GATED_FFN, **PRE_NORMS}


def sizes(c: Config, *, eps: str = "rms_norm_eps") -> dict[str, Any]:
    """Return the keys of nearly every architecture."""
    return {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": getattr(c, eps),
        "vocab_size": c.vocab_size,
    }


def head_sizes(c: Config) -> dict[str, Any]:
    return {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}


def rope_base(c: Config) -> dict[str, Any]:
    return {"rope.freq_base": c.rope_parameters["rope_theta"]}


def rope_size(c: Config, factor: float = 1.0) -> dict[str, Any]:
    """Return the key of the number of rotated elements of a head; `factor` is their share."""
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return {"rope.dimension_count": int(head_dim * factor)}


def stretched(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of YaRN without its bounds, from rotation parameters."""
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }


def yarn(c: Config) -> dict[str, Any]:
    rope = c.rope_parameters
    return {
        **stretched(rope),
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
    }


def yarn_on_full_layers() -> dict[str, Any]:
    """Return rotation parameters that stretch all layers but those with a window."""
    return {
        WINDOW: {"rope_type": "default", "rope_theta": 10000.0},
        FULL: {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }


def full_yarn(c: Config) -> dict[str, Any]:
    """Return the keys of RoPE's base and stretching in layers without a window."""
    rope = c.rope_parameters[FULL]
    return {"rope.freq_base": rope["rope_theta"], **stretched(rope)}


def experts(c: Config) -> dict[str, Any]:
    n_local = getattr(c, "num_local_experts", None)
    return {
        "expert_count": c.num_experts if n_local is None else n_local,
        "expert_used_count": c.num_experts_per_tok,
    }


def expert_width(c: Config) -> dict[str, Any]:
    return {"expert_feed_forward_length": c.moe_intermediate_size}


def shared_experts(c: Config) -> dict[str, Any]:
    """Return the keys of a sigmoid router with shared experts beside the routed ones."""
    return {
        "expert_shared_count": c.n_shared_experts,
        "expert_gating_func": 2,
        "expert_weights_scale": c.routed_scaling_factor,
        "expert_weights_norm": c.norm_topk_prob,
        "expert_group_count": c.n_group,
        "expert_group_used_count": c.topk_group,
    }


def granite_scales(c: Config) -> dict[str, Any]:
    return {
        "attention.scale": c.attention_multiplier,
        "embedding_scale": c.embedding_multiplier,
        "residual_scale": c.residual_multiplier,
        "logit_scale": c.logits_scaling,
    }


def renamed(name: str, change: Any) -> Change:
    """Return a change to one tensor called `name` with changed values."""
    return lambda values, _: {name: change(values)}


def with_biases(names: Mapping[str, str]) -> dict[str, str]:
    """Return the names of some weights and of their biases."""
    biases = {
        k.replace(".weight", ".bias"): v.replace(".weight", ".bias") for k, v in names.items()
    }
    return {**names, **biases}


def plus_one(names: Mapping[str, str]) -> dict[str, str | Change]:
    """Return changes of norms that multiply by 1 + weight; files hold the sum."""
    return {theirs: renamed(ours, lambda v: v + 1) for theirs, ours in names.items()}


def neighbours(name: str, heads: str) -> Change:
    """Return a change of queries' or keys' rows, so that neighbours rotate instead of halves.

    Args:
        heads: name of the number of heads in the configuration.
    """

    def permute(values: Array, c: Config) -> dict[str, Array]:
        halves = values.reshape(getattr(c, heads), 2, -1, *values.shape[1:])
        return {name: halves.swapaxes(1, 2).reshape(values.shape)}

    return permute


NEIGHBOURS: dict[str, str | Change] = {
    f"self_attn.{p}_proj.{kind}": neighbours(f"attn_{p}.{kind}", f"num_{heads}_heads")
    for p, heads in (("q", "attention"), ("k", "key_value"))
    for kind in ("weight", "bias")
}


def gate_and_up(values: Array, _: Config) -> dict[str, Array]:
    """Split experts (E, 2 n_ff, n_embd) in two tensors."""
    gate, up = np.split(values, 2, axis=1)
    return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}


EXPERTS: dict[str, str | Change] = {
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.gate_up_proj": gate_and_up,
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}

SHARED_EXPERTS: dict[str, str | Change] = {
    **EXPERTS,
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{
        f"mlp.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight"
        for part in ("gate", "up", "down")
    },
}
