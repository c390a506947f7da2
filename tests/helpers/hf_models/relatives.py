"""Models that differ from Llama in few places: Arcee, Seed-OSS, Hunyuan, EXAONE 4, Mellum, DBRX."""

from typing import Any

from transformers import (
    ArceeConfig,
    DbrxConfig,
    Exaone4Config,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    MellumConfig,
    SeedOssConfig,
)

from tests.helpers.hf_models.family import Array, Change, Config, Family
from tests.helpers.hf_models.parts import (
    ATTENTION,
    DENSE,
    EMBEDDING,
    EXPERTS,
    FULL,
    GATED_FFN,
    NEIGHBOURS,
    PRE_NORMS,
    SIZES,
    WINDOW,
    expert_width,
    experts,
    full_yarn,
    head_sizes,
    rope_base,
    rope_size,
    sizes,
    yarn_on_full_layers,
)


def common(c: Config) -> dict[str, Any]:
    return {**sizes(c), **head_sizes(c), **rope_base(c)}


def hunyuan_moe(c: Config) -> dict[str, Any]:
    return {
        **common(c),
        "expert_count": c.num_experts,
        "expert_used_count": c.moe_topk,
        "expert_shared_count": 1,
        "expert_feed_forward_length": c.intermediate_size,
        "expert_shared_feed_forward_length": c.intermediate_size,
    }


def mellum(c: Config) -> dict[str, Any]:
    return {
        **sizes(c),
        **head_sizes(c),
        **experts(c),
        **expert_width(c),
        **full_yarn(c),
        "rope.freq_base_swa": c.rope_parameters[FULL]["rope_theta"],
        "attention.sliding_window": c.sliding_window,
        "attention.sliding_window_pattern": [kind == WINDOW for kind in c.layer_types],
    }


def dbrx(c: Config) -> dict[str, Any]:
    return {
        "block_count": c.n_layers,
        "context_length": c.max_seq_len,
        "embedding_length": c.d_model,
        "feed_forward_length": c.ffn_config.ffn_hidden_size,
        "attention.head_count": c.n_heads,
        "attention.head_count_kv": c.attn_config.kv_n_heads,
        "attention.clamp_kqv": c.attn_config.clip_qkv,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": c.rope_parameters["rope_theta"],
        "expert_count": c.ffn_config.moe_num_experts,
        "expert_used_count": c.ffn_config.moe_top_k,
    }


def stacked(name: str, *, transposed: bool = False) -> Change:
    """Return a change of experts that lie one below the other to (E, out, in)."""

    def change(values: Array, c: Config) -> dict[str, Array]:
        experts = values.reshape(c.ffn_config.moe_num_experts, -1, values.shape[-1])
        return {name: experts.swapaxes(1, 2) if transposed else experts}

    return change


HUNYUAN = {
    **DENSE,
    "self_attn.query_layernorm.weight": "attn_q_norm.weight",
    "self_attn.key_layernorm.weight": "attn_k_norm.weight",
}
UNGATED_FFN = {f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("up", "down")}

FAMILIES = [
    Family(
        "arcee",
        "arcee",
        "arcee-q4_k_m.gguf",
        lambda: ArceeConfig(**SIZES, num_hidden_layers=2, head_dim=24),
        lambda c: {**common(c), **rope_size(c)},
        {**EMBEDDING, **ATTENTION, **NEIGHBOURS, **PRE_NORMS, **UNGATED_FFN},
    ),
    Family(
        "seed_oss",
        "seed_oss",
        "seed_oss-q4_k_m.gguf",
        lambda: SeedOssConfig(**SIZES, num_hidden_layers=2, head_dim=24),
        common,
        {**DENSE, "post_attention_layernorm.weight": "post_attention_norm.weight"},
    ),
    Family(
        "hunyuan-dense",
        "hunyuan-dense",
        "hunyuan-dense-q4_k_m.gguf",
        lambda: HunYuanDenseV1Config(**SIZES, num_hidden_layers=2, head_dim=24),
        common,
        HUNYUAN,
    ),
    Family(
        "hunyuan-moe",
        "hunyuan-moe",
        "hunyuan-moe-q4_k_m.gguf",
        lambda: HunYuanMoEV1Config(
            **SIZES, num_hidden_layers=2, head_dim=24, num_experts=3, moe_topk=2
        ),
        hunyuan_moe,
        {
            **HUNYUAN,
            **EXPERTS,
            "mlp.gate.wg.weight": "ffn_gate_inp.weight",
            **{
                f"mlp.shared_mlp.{part}_proj.weight": f"ffn_{part}_shexp.weight"
                for part in ("gate", "up", "down")
            },
        },
    ),
    Family(
        "exaone4",
        "exaone4",
        "exaone4-q4_k_m.gguf",
        lambda: Exaone4Config(
            **SIZES, num_hidden_layers=2, head_dim=24, sliding_window=None, layer_types=[FULL] * 2
        ),
        common,
        {
            **EMBEDDING,
            **ATTENTION,
            **GATED_FFN,
            "post_attention_layernorm.weight": "post_attention_norm.weight",
            "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
        },
    ),
    Family(
        "mellum",
        "mellum",
        "mellum-q4_k_m.gguf",
        lambda: MellumConfig(
            **SIZES,
            num_hidden_layers=3,
            head_dim=24,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            sliding_window=12,
            layer_types=[WINDOW, FULL, WINDOW],
            rope_parameters=yarn_on_full_layers(),
        ),
        mellum,
        {**EMBEDDING, **ATTENTION, **PRE_NORMS, **EXPERTS},
    ),
    Family(
        "dbrx",
        "dbrx",
        None,
        lambda: DbrxConfig(
            d_model=64,
            n_heads=4,
            n_layers=2,
            max_seq_len=256,
            vocab_size=141,
            attn_config={"kv_n_heads": 2, "clip_qkv": 0.9, "rope_theta": 10000.0},
            ffn_config={"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2},
        ),
        dbrx,
        {
            "transformer.wte.weight": "token_embd.weight",
            "transformer.norm_f.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
            "norm_attn_norm.norm_1.weight": "attn_norm.weight",
            "norm_attn_norm.norm_2.weight": "attn_output_norm.weight",
            "norm_attn_norm.attn.Wqkv.weight": "attn_qkv.weight",
            "norm_attn_norm.attn.out_proj.weight": "attn_output.weight",
            "ffn.router.layer.weight": "ffn_gate_inp.weight",
            "ffn.experts.mlp.w1": stacked("ffn_gate_exps.weight"),
            "ffn.experts.mlp.v1": stacked("ffn_up_exps.weight"),
            "ffn.experts.mlp.w2": stacked("ffn_down_exps.weight", transposed=True),
        },
    ),
]
