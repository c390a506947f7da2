"""LFM2: short convolutions between layers with attention."""

from typing import Any

from transformers import Lfm2Config

from tests.helpers.hf_models.family import Change, Config, Family
from tests.helpers.hf_models.parts import ATTENTION, FULL, SIZES, renamed, rope_base, sizes


def lfm2(c: Config) -> dict[str, Any]:
    n_kv = [c.num_key_value_heads if kind == FULL else 0 for kind in c.layer_types]
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

FAMILIES = [
    Family(
        "lfm2",
        "lfm2",
        "lfm2-q4_k_m.gguf",
        lambda: Lfm2Config(
            **SIZES,
            num_hidden_layers=4,
            layer_types=["conv", "conv", FULL, "conv"],
            block_auto_adjust_ff_dim=False,
        ),
        lfm2,
        LFM2,
    )
]
