"""Families whose blocks differ in other ways: LayerNorms, parallel blocks, convolutions."""

from typing import Any

from transformers import Cohere2Config, GPT2Config, Lfm2Config, Starcoder2Config

from tests.helpers.hf_models.family import Change, Config, Family
from tests.helpers.hf_models.parts import (
    ATTENTION,
    DENSE,
    EMBEDDING,
    PRE_NORMS,
    SIZES,
    head_sizes,
    renamed,
    rope_base,
    rope_size,
    sizes,
    with_biases,
)


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


def lfm2(c: Config) -> dict[str, Any]:
    n_kv = [c.num_key_value_heads if kind == "full_attention" else 0 for kind in c.layer_types]
    return {
        **sizes(c, eps="norm_eps"),
        **rope_base(c),
        "attention.head_count_kv": n_kv,
        "shortconv.l_cache": c.conv_L_cache,
    }


LFM2: dict[str, str | Change] = {
    **ATTENTION,
    "self_attn.out_proj.weight": "attn_output.weight",
    "self_attn.q_layernorm.weight": "attn_q_norm.weight",
    "self_attn.k_layernorm.weight": "attn_k_norm.weight",
    "conv.conv.weight": renamed("shortconv.conv.weight", lambda v: v[:, 0]),
    "conv.in_proj.weight": "shortconv.in_proj.weight",
    "conv.out_proj.weight": "shortconv.out_proj.weight",
    "feed_forward.w1.weight": "ffn_gate.weight",
    "feed_forward.w2.weight": "ffn_down.weight",
    "feed_forward.w3.weight": "ffn_up.weight",
    "operator_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "model.embed_tokens.weight": "token_embd.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
}


def starcoder2(c: Config) -> dict[str, Any]:
    return {
        **sizes(c, eps="norm_epsilon"),
        **rope_base(c),
        "attention.layer_norm_epsilon": c.norm_epsilon,
    }


def gpt2(c: Config) -> dict[str, Any]:
    return {
        "block_count": c.n_layer,
        "context_length": c.n_positions,
        "embedding_length": c.n_embd,
        "feed_forward_length": 4 * c.n_embd,
        "attention.head_count": c.n_head,
        "attention.layer_norm_epsilon": c.layer_norm_epsilon,
        "vocab_size": c.vocab_size,
    }


GPT2_MATRICES = {
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}

GPT2: dict[str, str | Change] = {
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    **with_biases(
        {
            "transformer.ln_f.weight": "output_norm.weight",
            "ln_1.weight": "attn_norm.weight",
            "ln_2.weight": "ffn_norm.weight",
        }
    ),
    **{f"{theirs}.bias": f"{ours}.bias" for theirs, ours in GPT2_MATRICES.items()},
    **{
        f"{theirs}.weight": renamed(f"{ours}.weight", lambda v: v.T)
        for theirs, ours in GPT2_MATRICES.items()
    },
}

FAMILIES = [
    Family(
        "cohere2",
        "cohere2",
        "cohere2-q4_k_m.gguf",
        lambda: Cohere2Config(**SIZES, num_hidden_layers=4, sliding_window=12, logit_scale=0.5),
        cohere2,
        DENSE,
    ),
    Family(
        "lfm2",
        "lfm2",
        "lfm2-q4_k_m.gguf",
        lambda: Lfm2Config(
            **SIZES,
            num_hidden_layers=4,
            layer_types=["conv", "conv", "full_attention", "conv"],
            block_auto_adjust_ff_dim=False,
        ),
        lfm2,
        LFM2,
    ),
    Family(
        "starcoder2",
        "starcoder2",
        "starcoder2-q4_k_m.gguf",
        lambda: Starcoder2Config(**SIZES, num_hidden_layers=2),
        starcoder2,
        {
            **ATTENTION,
            **with_biases(EMBEDDING | PRE_NORMS),
            **with_biases(
                {"mlp.c_fc.weight": "ffn_up.weight", "mlp.c_proj.weight": "ffn_down.weight"}
            ),
        },
    ),
    Family(
        "gpt2",
        "gpt2",
        "gpt2-q4_k_m.gguf",
        lambda: GPT2Config(
            vocab_size=SIZES["vocab_size"],
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=2,
        ),
        gpt2,
        GPT2,
    ),
]
