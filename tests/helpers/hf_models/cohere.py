"""Models with LayerNorms and a gated FFN, in parallel blocks: Cohere's, StableLM's largest."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import Cohere2Config, Cohere2MoeConfig, CohereConfig, OlmoConfig, StableLmConfig

from tests.helpers.hf_models.family import Array, Change, Config, Family
from tests.helpers.hf_models.parts import (
    DENSE,
    NEIGHBOURS,
    SHARED_EXPERTS,
    SIZES,
    WINDOW,
    head_sizes,
    rope_base,
    rope_size,
    sizes,
    with_biases,
)


def layer_norm_sizes(c: Config) -> dict[str, Any]:
    rest = sizes(c, eps="layer_norm_eps")
    del rest["attention.layer_norm_rms_epsilon"]
    return {**rest, "attention.layer_norm_epsilon": c.layer_norm_eps}


def command_r(c: Config) -> dict[str, Any]:
    return {
        **layer_norm_sizes(c),
        **rope_base(c),
        "rope.scaling.type": "none",
        "logit_scale": c.logit_scale,
    }


def cohere2(c: Config) -> dict[str, Any]:
    return {
        **sizes(c, eps="layer_norm_eps"),
        **head_sizes(c),
        **rope_base(c),
        **rope_size(c),
        "attention.layer_norm_epsilon": c.layer_norm_eps,
        "attention.sliding_window": c.sliding_window,
        "rope.scaling.type": "none",
        "logit_scale": c.logit_scale,
    }


def cohere2_moe(c: Config) -> dict[str, Any]:
    return {
        **layer_norm_sizes(c),
        **head_sizes(c),
        **rope_size(c),
        **rope_base(c),
        "feed_forward_length": c.prefix_dense_intermediate_size,
        "leading_dense_block_count": c.mlp_layer_types.count("dense"),
        "expert_feed_forward_length": c.intermediate_size,
        "expert_count": c.num_experts,
        "expert_used_count": c.num_experts_per_tok,
        "expert_gating_func": 2,
        "expert_weights_norm": c.norm_topk_prob,
        "expert_shared_count": c.num_shared_experts,
        "attention.sliding_window": c.sliding_window,
        "attention.sliding_window_pattern": [k == WINDOW for k in c.layer_types],
        "logit_scale": c.logit_scale,
    }


def olmo(c: Config) -> dict[str, Any]:
    return {
        **sizes(c, eps="layer_norm_eps"),
        **rope_base(c),
        "attention.layer_norm_epsilon": c.layer_norm_eps,
        "attention.clamp_kqv": c.clip_qkv,
    }


def stablelm(c: Config) -> dict[str, Any]:
    return {
        **layer_norm_sizes(c),
        **rope_size(c, c.rope_parameters["partial_rotary_factor"]),
        "use_parallel_residual": c.use_parallel_residual,
    }


class HeadNormFamily(Family):
    """Family whose model has a module per head for norms that files store together."""

    def convert(self, config: Config, state: Mapping[str, Array]) -> dict[str, Array]:
        heads: dict[str, list[Array]] = {}
        for name, values in state.items():
            heads.setdefault(re.sub(r"\.norms\.\d+\.", ".heads.", name), []).append(values)
        joined = {k: np.stack(v) if ".heads." in k else v[0] for k, v in heads.items()}
        return super().convert(config, joined)


STABLELM: dict[str, str | Change] = {
    **with_biases(DENSE),
    "self_attn.q_layernorm.heads.weight": "attn_q_norm.weight",
    "self_attn.k_layernorm.heads.weight": "attn_k_norm.weight",
}


def stablelm_family(name: str, like: str | None, **options: bool) -> Family:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    return HeadNormFamily(
        name,
        "stablelm",
        like,
        lambda: StableLmConfig(**SIZES, num_hidden_layers=2, rope_parameters=rope, **options),
        stablelm,
        STABLELM,
    )


FAMILIES = [
    Family(
        "command-r",
        "command-r",
        None,
        lambda: CohereConfig(**SIZES, num_hidden_layers=2, logit_scale=0.5, use_qk_norm=True),
        command_r,
        DENSE,
    ),
    Family(
        "cohere2",
        "cohere2",
        "cohere2-q4_k_m.gguf",
        lambda: Cohere2Config(**SIZES, num_hidden_layers=4, sliding_window=12, logit_scale=0.5),
        cohere2,
        DENSE,
    ),
    Family(
        "cohere2moe",
        "cohere2moe",
        None,
        lambda: Cohere2MoeConfig(
            **SIZES | {"intermediate_size": 72},
            num_hidden_layers=4,
            head_dim=16,
            first_k_dense_replace=1,
            sliding_window_pattern=3,
            prefix_dense_intermediate_size=104,
            num_experts=5,
            num_experts_per_tok=2,
            num_shared_experts=2,
            sliding_window=12,
            expert_selection_fn="sigmoid",
            logit_scale=0.5,
        ),
        cohere2_moe,
        {**DENSE, **SHARED_EXPERTS},
    ),
    stablelm_family("stablelm", "stablelm-q4_k_m.gguf", use_qkv_bias=True),
    stablelm_family("stablelm-12b", None, use_parallel_residual=True, qk_layernorm=True),
    Family(
        "olmo",
        "olmo",
        "olmo-q4_k_m.gguf",
        lambda: OlmoConfig(**SIZES, num_hidden_layers=2, clip_qkv=1.0, layer_norm_eps=1e-5),
        olmo,
        {**DENSE, **NEIGHBOURS},
    ),
]
