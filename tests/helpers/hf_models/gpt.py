"""Models between GPT-2 and Llama: LayerNorms, fused heads, parallel blocks, ALiBi."""

from typing import Any

import numpy as np
from transformers import BloomConfig, FalconConfig, GPTNeoXConfig, MptConfig, PhiConfig

from tests.helpers.hf_models.family import Array, Change, Config, Family
from tests.helpers.hf_models.parts import ATTENTION, SIZES, with_biases

GPT_SIZES = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "pad_token_id")}


def sizes(c: Config, *, n_ff: int, eps: float, n_ctx: int = 256) -> dict[str, Any]:
    return {
        "block_count": c.num_hidden_layers,
        "context_length": n_ctx,
        "embedding_length": c.hidden_size,
        "feed_forward_length": n_ff,
        "attention.head_count": c.num_attention_heads,
        "attention.layer_norm_epsilon": eps,
        "vocab_size": c.vocab_size,
    }


def gpt_neox(c: Config) -> dict[str, Any]:
    head_dim = c.hidden_size // c.num_attention_heads
    return {
        **sizes(c, n_ff=c.intermediate_size, eps=c.layer_norm_eps),
        "rope.dimension_count": int(head_dim * c.rope_parameters["partial_rotary_factor"]),
        "use_parallel_residual": c.use_parallel_residual,
    }


def falcon(c: Config) -> dict[str, Any]:
    return {
        **sizes(c, n_ff=4 * c.hidden_size, eps=c.layer_norm_epsilon, n_ctx=2048),
        "attention.head_count_kv": falcon_kv_heads(c),
        "tensor_data_layout": "jploski",
    }


def falcon_kv_heads(c: Config) -> int:
    return int(c.num_kv_heads) if c.new_decoder_architecture else 1


def bloom(c: Config) -> dict[str, Any]:
    return {
        **sizes(c, n_ff=4 * c.hidden_size, eps=c.layer_norm_epsilon),
        "attention.head_count_kv": c.num_attention_heads,
    }


def mpt(c: Config) -> dict[str, Any]:
    return {
        **sizes(c, n_ff=4 * c.hidden_size, eps=1e-5),
        "attention.max_alibi_bias": float(c.attn_config.alibi_bias_max),
        "attention.clamp_kqv": c.attn_config.clip_qkv,
    }


def phi(c: Config) -> dict[str, Any]:
    head_dim = c.hidden_size // c.num_attention_heads
    return {
        **sizes(c, n_ff=c.intermediate_size, eps=c.layer_norm_eps),
        "attention.head_count_kv": c.num_key_value_heads,
        "rope.dimension_count": int(head_dim * c.rope_parameters["partial_rotary_factor"]),
    }


def joined(kind: str) -> Change:
    """Return a change that sorts rows q, k and v of each group of heads to all q, all k, all v."""

    def change(values: Array, c: Config) -> dict[str, Array]:
        n_kv = falcon_kv_heads(c) if c.model_type == "falcon" else c.num_attention_heads
        size = c.num_attention_heads // n_kv + 2
        groups = values.reshape(n_kv, size, -1, *values.shape[1:])
        parts = np.split(groups, [size - 2, size - 1], axis=1)
        sorted_rows = [part.reshape(-1, *values.shape[1:]) for part in parts]
        return {f"attn_qkv.{kind}": np.concatenate(sorted_rows)}

    return change


MLP = with_biases(
    {"mlp.dense_h_to_4h.weight": "ffn_up.weight", "mlp.dense_4h_to_h.weight": "ffn_down.weight"}
)

GPT_NEOX: dict[str, str | Change] = {
    **MLP,
    **with_biases(
        {
            "gpt_neox.final_layer_norm.weight": "output_norm.weight",
            "input_layernorm.weight": "attn_norm.weight",
            "post_attention_layernorm.weight": "ffn_norm.weight",
            "attention.dense.weight": "attn_output.weight",
        }
    ),
    "gpt_neox.embed_in.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "attention.query_key_value.weight": joined("weight"),
    "attention.query_key_value.bias": joined("bias"),
}

EMBEDDINGS = {
    "transformer.word_embeddings.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    **with_biases({"transformer.ln_f.weight": "output_norm.weight"}),
}

FALCON: dict[str, str | Change] = {
    **EMBEDDINGS,
    **MLP,
    **with_biases(
        {
            "input_layernorm.weight": "attn_norm.weight",
            "ln_mlp.weight": "attn_norm.weight",
            "ln_attn.weight": "attn_norm_2.weight",
        }
    ),
    "self_attention.query_key_value.weight": joined("weight"),
    "self_attention.dense.weight": "attn_output.weight",
}

BLOOM: dict[str, str | Change] = {
    **EMBEDDINGS,
    **MLP,
    **with_biases(
        {
            "transformer.word_embeddings_layernorm.weight": "token_embd_norm.weight",
            "input_layernorm.weight": "attn_norm.weight",
            "post_attention_layernorm.weight": "ffn_norm.weight",
            "self_attention.dense.weight": "attn_output.weight",
        }
    ),
    "self_attention.query_key_value.weight": joined("weight"),
    "self_attention.query_key_value.bias": joined("bias"),
}

MPT = {
    "transformer.wte.weight": "token_embd.weight",
    "transformer.norm_f.weight": "output_norm.weight",
    "norm_1.weight": "attn_norm.weight",
    "norm_2.weight": "ffn_norm.weight",
    "attn.Wqkv.weight": "attn_qkv.weight",
    "attn.out_proj.weight": "attn_output.weight",
    "ffn.up_proj.weight": "ffn_up.weight",
    "ffn.down_proj.weight": "ffn_down.weight",
}

PHI = {
    **ATTENTION,
    **with_biases(
        {
            "model.final_layernorm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
            "input_layernorm.weight": "attn_norm.weight",
            "self_attn.dense.weight": "attn_output.weight",
            "mlp.fc1.weight": "ffn_up.weight",
            "mlp.fc2.weight": "ffn_down.weight",
        }
    ),
    "model.embed_tokens.weight": "token_embd.weight",
}


def gpt_neox_family(name: str, like: str | None, *, is_parallel: bool) -> Family:
    return Family(
        name,
        "gptneox",
        like,
        lambda: GPTNeoXConfig(
            **GPT_SIZES, num_hidden_layers=2, use_parallel_residual=is_parallel,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                             "partial_rotary_factor": 0.25},
        ),
        gpt_neox,
        GPT_NEOX,
    )  # fmt: skip


FAMILIES = [
    gpt_neox_family("gptneox", "gptneox-q4_k_m.gguf", is_parallel=True),
    gpt_neox_family("gptneox-sequential", None, is_parallel=False),
    Family(
        "falcon-7b",
        "falcon",
        None,
        lambda: FalconConfig(
            vocab_size=141, hidden_size=80, num_attention_heads=5, num_hidden_layers=2
        ),
        falcon,
        FALCON,
    ),
    Family(
        "falcon-40b",
        "falcon",
        "falcon-q4_k_m.gguf",
        lambda: FalconConfig(
            vocab_size=141, hidden_size=64, num_attention_heads=4, num_hidden_layers=2,
            num_kv_heads=2, new_decoder_architecture=True,
        ),
        falcon,
        FALCON,
    ),
    Family(
        "bloom",
        "bloom",
        "bloom-q4_k_m.gguf",
        lambda: BloomConfig(vocab_size=141, hidden_size=96, n_head=6, n_layer=2),
        bloom,
        BLOOM,
    ),
    Family(
        "mpt",
        "mpt",
        None,
        lambda: MptConfig(
            vocab_size=141, d_model=96, n_heads=6, n_layers=2, max_seq_len=256,
            attn_config={"alibi": True, "alibi_bias_max": 8, "clip_qkv": 1.5},
        ),
        mpt,
        MPT,
    ),
    Family(
        "phi2",
        "phi2",
        "phi2-q4_k_m.gguf",
        lambda: PhiConfig(
            **SIZES | {"num_key_value_heads": 4}, num_hidden_layers=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                             "partial_rotary_factor": 0.5},
        ),
        phi,
        PHI,
    ),
]  # fmt: skip
