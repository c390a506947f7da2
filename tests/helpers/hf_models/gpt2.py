"""GPT-2 and StarCoder 2: LayerNorms with biases, and an FFN without a gate."""

from typing import Any

from transformers import GPT2Config, Starcoder2Config

from tests.helpers.hf_models.family import Change, Config, Family
from tests.helpers.hf_models.parts import (
    ATTENTION,
    EMBEDDING,
    PRE_NORMS,
    SIZES,
    renamed,
    rope_base,
    sizes,
    with_biases,
)


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
