"""Models of families in the sizes of published ones, with random weights in Q8_0.

    python -m tests.bench.family_shapes gemma3-270m out.gguf
    python -m tests.bench.family_shapes qwen35-half out.gguf --mtp

They have no vocabulary: what measures with them uses token ids. `tests.bench.synthetic` makes
larger models of fewer kinds, without `transformers`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen3_5TextConfig

from tests.helpers.hf_models import gemma, linear_attention
from tests.helpers.hf_models.family import Array, Config, Family
from tests.helpers.hf_models.parts import FULL, WINDOW
from tests.helpers.tiny_gguf import finish, value_type

BLOCK = 32
"""Number of columns of a block of Q8_0."""


def gemma3_270m() -> Config:
    """Return the sizes of Gemma 3 270M: 18 layers, of which every sixth sees all tokens."""
    return Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        max_position_embeddings=32768,
        rope_parameters={
            WINDOW: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "linear", "factor": 1.0, "rope_theta": 1e6},
        },
    )


def qwen35_half() -> Config:
    """Return the sizes of Qwen3.5 0.8B with half of its layers, of which every fourth attends."""
    return Qwen3_5TextConfig(
        vocab_size=248320,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=262144,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    )


def family_named(name: str, families: list[Family]) -> Family:
    """Return a family by its name."""
    return next(one for one in families if one.name == name)


SHAPES = {
    "gemma3-270m": (family_named("gemma3", gemma.FAMILIES), gemma3_270m),
    "qwen35-half": (family_named("qwen35", linear_attention.FAMILIES), qwen35_half),
}


def add_quantised(writer: GGUFWriter, name: str, values: Array) -> None:
    """Add a tensor: a matrix of whole blocks in Q8_0, anything else in F32."""
    values = np.ascontiguousarray(values, np.float32)
    if values.ndim == 2 and not values.shape[1] % BLOCK and "conv1d" not in name:
        kind = GGMLQuantizationType.Q8_0
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values)


def with_mtp(tensors: dict[str, Array], source: int, goal: int) -> dict[str, Array]:
    """Return the tensors of an MTP block: those of a block that attends, and what joins its inputs.

    Args:
        source: number of that block.
        goal: number of the MTP block.
    """
    block = {name: value for name, value in tensors.items() if name.startswith(f"blk.{source}.")}
    n_embd = len(tensors["output_norm.weight"])
    joint = np.random.default_rng(0).standard_normal((n_embd, 2 * n_embd), np.float32)
    made = {name.replace(f".{source}.", f".{goal}.", 1): value for name, value in block.items()}
    ones = np.ones(n_embd, np.float32)
    own = {"enorm": ones, "hnorm": ones, "eh_proj": joint / np.float32(np.sqrt(2 * n_embd))}
    return made | {f"blk.{goal}.nextn.{name}.weight": value for name, value in own.items()}


def write_shape(name: str, path: Path, *, has_mtp: bool = False) -> None:
    """Write a model of `SHAPES`; with an MTP block behind its layers, if it shall have one."""
    family, make_config = SHAPES[name]
    config = make_config()
    torch.manual_seed(0)
    state = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    writer = GGUFWriter(path, family.arch)
    metadata, n_layer = family.metadata(config), config.num_hidden_layers
    if has_mtp:
        metadata |= {"block_count": n_layer + 1, "nextn_predict_layers": 1}
    for key, value in metadata.items():
        writer.add_key_value(f"{family.arch}.{key}", value, value_type(value))
    tensors = family.convert(config, {key: value.numpy() for key, value in state.items()})
    if has_mtp:
        tensors |= with_mtp(tensors, n_layer - 1, n_layer)
    for tensor, values in {**tensors, **family.extras(config)}.items():
        add_quantised(writer, tensor, values)
    finish(writer)


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--mtp", action="store_true", help="add an MTP block")
    args = parser.parse_args()
    write_shape(args.shape, args.file, has_mtp=args.mtp)


if __name__ == "__main__":
    main()
