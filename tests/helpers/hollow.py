"""Header-only files of large models, for tests that plan and paint but never compute."""

import os
from collections.abc import Mapping
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tests.helpers import raw_gguf
from tests.helpers.model_draft import encoded

F32, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0
Q4_K, Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K

Tensor = tuple[tuple[int, ...], GGMLQuantizationType]


def hollow_moe(
    path: Path,
    *,
    n_layer: int = 80,
    n_embd: int = 8192,
    n_head: int = 64,
    n_head_kv: int = 8,
    n_expert: int = 128,
    n_ff_exp: int = 1536,
    n_vocab: int = 151936,
) -> Path:
    """Write a Qwen 3 MoE in Q4_K and Q6_K, mixed as in Q4_K_M, with a hole for the weights.

    It takes no room on disks whose files may have holes.
    """
    meta = {
        "general.architecture": "qwen3moe",
        "general.name": "hollow",
        "qwen3moe.block_count": n_layer,
        "qwen3moe.context_length": 131072,
        "qwen3moe.embedding_length": n_embd,
        "qwen3moe.feed_forward_length": 4 * n_ff_exp,
        "qwen3moe.attention.head_count": n_head,
        "qwen3moe.attention.head_count_kv": n_head_kv,
        "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3moe.expert_count": n_expert,
        "qwen3moe.expert_used_count": min(8, n_expert),
        "qwen3moe.expert_feed_forward_length": n_ff_exp,
    }
    tensors: dict[str, Tensor] = {
        "token_embd.weight": ((n_vocab, n_embd), Q4_K),
        "output_norm.weight": ((n_embd,), F32),
        "output.weight": ((n_vocab, n_embd), Q6_K),
    }
    for layer in range(n_layer):
        better = Q6_K if layer % 3 == 0 else Q4_K
        block = _block(n_embd, n_embd // n_head, n_head_kv, n_expert, n_ff_exp, better)
        tensors |= {f"blk.{layer}.{name}.weight": tensor for name, tensor in block.items()}
    return _written(path, meta, tensors)


def hollow_llama(
    path: Path, *, n_layer: int = 32, n_embd: int = 4096, n_head: int = 32, n_head_kv: int = 8,
    n_ff: int = 14336, n_vocab: int = 128256, better: int = 1,
) -> Path:  # fmt: skip
    """Write a Llama in Q4_K and Q6_K, of the size of Llama 3 8B unless said otherwise.

    Args:
        better: one of so many blocks has Q6_K; one of two as in Q4_K_M.
    """
    meta = {
        "general.architecture": "llama",
        "general.name": "hollow",
        "llama.block_count": n_layer,
        "llama.context_length": 131072,
        "llama.embedding_length": n_embd,
        "llama.feed_forward_length": n_ff,
        "llama.attention.head_count": n_head,
        "llama.attention.head_count_kv": n_head_kv,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0,
    }
    n_kv = n_embd // n_head * n_head_kv
    block: dict[str, Tensor] = {
        "attn_norm": ((n_embd,), F32),
        "attn_q": ((n_embd, n_embd), Q4_K),
        "attn_k": ((n_kv, n_embd), Q4_K),
        "attn_v": ((n_kv, n_embd), Q6_K),
        "attn_output": ((n_embd, n_embd), Q4_K),
        "ffn_norm": ((n_embd,), F32),
        "ffn_gate": ((n_ff, n_embd), Q4_K),
        "ffn_up": ((n_ff, n_embd), Q4_K),
        "ffn_down": ((n_embd, n_ff), Q6_K),
    }
    tensors: dict[str, Tensor] = {
        "token_embd.weight": ((n_vocab, n_embd), Q4_K),
        "output_norm.weight": ((n_embd,), F32),
        "output.weight": ((n_vocab, n_embd), Q6_K),
    }
    for layer in range(n_layer):
        lesser = {} if layer % better == 0 else dict.fromkeys(("attn_v", "ffn_down"), Q4_K)
        for name, (shape, kind) in block.items():
            tensors[f"blk.{layer}.{name}.weight"] = shape, lesser.get(name, kind)
    return _written(path, meta, tensors)


def hollow_gemma3(
    path: Path, *, n_layer: int, n_embd: int, n_head: int, n_head_kv: int, head_dim: int,
    n_ff: int, n_swa: int, n_ctx: int, n_vocab: int = 262144,
) -> Path:  # fmt: skip
    """Write a Gemma 3 in Q8_0, of which each sixth layer sees the whole context."""
    sizes = {
        "block_count": n_layer, "context_length": n_ctx, "embedding_length": n_embd,
        "feed_forward_length": n_ff, "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv, "attention.key_length": head_dim,
        "attention.value_length": head_dim, "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": n_swa,
    }  # fmt: skip
    block: dict[str, Tensor] = {
        "attn_norm": ((n_embd,), F32),
        "attn_q": ((n_head * head_dim, n_embd), Q8_0),
        "attn_k": ((n_head_kv * head_dim, n_embd), Q8_0),
        "attn_v": ((n_head_kv * head_dim, n_embd), Q8_0),
        "attn_q_norm": ((head_dim,), F32),
        "attn_k_norm": ((head_dim,), F32),
        "attn_output": ((n_embd, n_head * head_dim), Q8_0),
        "post_attention_norm": ((n_embd,), F32),
        "ffn_norm": ((n_embd,), F32),
        "ffn_gate": ((n_ff, n_embd), Q8_0),
        "ffn_up": ((n_ff, n_embd), Q8_0),
        "ffn_down": ((n_embd, n_ff), Q8_0),
        "post_ffw_norm": ((n_embd,), F32),
    }
    meta = {"general.architecture": "gemma3", "general.name": "hollow"}
    ends = {"token_embd.weight": ((n_vocab, n_embd), Q8_0), "output_norm.weight": ((n_embd,), F32)}
    return _written(path, meta | _named("gemma3", sizes), ends | _blocks(n_layer, block))


def hollow_llama4(path: Path, n_layer: int = 48, n_ctx: int = 131072) -> Path:
    """Write a Llama 4 with the attention of Scout, but few and small experts."""
    sizes = {
        "block_count": n_layer, "context_length": n_ctx, "embedding_length": 5120,
        "feed_forward_length": 16384, "attention.head_count": 40, "attention.head_count_kv": 8,
        "attention.key_length": 128, "attention.value_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-5, "interleave_moe_layer_step": 1,
        "expert_count": 16, "expert_used_count": 1, "expert_feed_forward_length": 256,
    }  # fmt: skip
    block: dict[str, Tensor] = {
        "attn_norm": ((5120,), F32),
        "attn_q": ((5120, 5120), Q4_K),
        "attn_k": ((1024, 5120), Q4_K),
        "attn_v": ((1024, 5120), Q4_K),
        "attn_output": ((5120, 5120), Q4_K),
        "ffn_norm": ((5120,), F32),
        "ffn_gate_inp": ((16, 5120), F32),
        "ffn_gate_exps": ((16, 256, 5120), Q4_K),
        "ffn_up_exps": ((16, 256, 5120), Q4_K),
        "ffn_down_exps": ((16, 5120, 256), Q4_K),
        "ffn_gate_shexp": ((256, 5120), Q4_K),
        "ffn_up_shexp": ((256, 5120), Q4_K),
        "ffn_down_shexp": ((5120, 256), Q4_K),
    }
    meta = {"general.architecture": "llama4", "general.name": "hollow"}
    ends: dict[str, Tensor] = {
        "token_embd.weight": ((202048, 5120), Q4_K),
        "output_norm.weight": ((5120,), F32),
        "output.weight": ((202048, 5120), Q6_K),
    }
    return _written(path, meta | _named("llama4", sizes), ends | _blocks(n_layer, block))


def _named(architecture: str, sizes: Mapping[str, object]) -> dict[str, object]:
    return {f"{architecture}.{name}": size for name, size in sizes.items()}


def _blocks(n_layer: int, block: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"blk.{layer}.{name}.weight": tensor
        for layer in range(n_layer)
        for name, tensor in block.items()
    }


def hollow_70b(path: Path) -> Path:
    """Write a Llama of the size and types of Llama 3 70B in Q4_K_M."""
    return hollow_llama(path, n_layer=80, n_embd=8192, n_head=64, n_ff=28672, better=2)


def _written(path: Path, meta: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Path:
    entries, offset = [], 0
    for name, (shape, kind) in tensors.items():
        entries.append(raw_gguf.tensor(name, shape[::-1], kind, offset))
        offset += -(-_n_bytes(shape, kind) // 32) * 32
    header = raw_gguf.gguf([encoded(key, value) for key, value in meta.items()], entries)
    path.write_bytes(header)
    os.truncate(path, len(header) + offset)
    return path


def _block(
    n_embd: int, head_dim: int, n_head_kv: int, n_expert: int, n_ff: int,
    better: GGMLQuantizationType,
) -> dict[str, Tensor]:  # fmt: skip
    n_kv = head_dim * n_head_kv
    return {
        "attn_norm": ((n_embd,), F32),
        "attn_q": ((n_embd, n_embd), Q4_K),
        "attn_k": ((n_kv, n_embd), Q4_K),
        "attn_v": ((n_kv, n_embd), better),
        "attn_output": ((n_embd, n_embd), Q4_K),
        "attn_q_norm": ((head_dim,), F32),
        "attn_k_norm": ((head_dim,), F32),
        "ffn_norm": ((n_embd,), F32),
        "ffn_gate_inp": ((n_expert, n_embd), F32),
        "ffn_gate_exps": ((n_expert, n_ff, n_embd), Q4_K),
        "ffn_up_exps": ((n_expert, n_ff, n_embd), Q4_K),
        "ffn_down_exps": ((n_expert, n_embd, n_ff), better),
    }


def _n_bytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block_size, type_size = GGML_QUANT_SIZES[kind]
    n = 1
    for size in shape:
        n *= size
    return n // block_size * type_size
