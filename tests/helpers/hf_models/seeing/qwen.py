"""Qwen 2.5-VL, Qwen 3-VL and Qwen 3.5 with their pictures."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2VLImageProcessorPil, Qwen3_5Config, Qwen3VLConfig

from tests.helpers.hf_models.family import Array, Config, Family
from tests.helpers.hf_models.linear_attention import FAMILIES as LINEARS
from tests.helpers.hf_models.parts import DENSE, SIZES, head_sizes, rope_base, sizes
from tests.helpers.hf_models.seeing.family import (
    CHAT_TEMPLATE,
    HALF,
    N_VOCAB,
    TEXT,
    Parts,
    SeeingFamily,
    tower_sizes,
)


def qwen3vl_config() -> Config:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
    text = SIZES | {
        "vocab_size": N_VOCAB, "num_hidden_layers": 3, "head_dim": 32, "rope_parameters": rope,
        "max_position_embeddings": 512, "tie_word_embeddings": True,
    }  # fmt: skip
    return Qwen3VLConfig(
        text_config=text,
        vision_config={
            "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48,
            "patch_size": 4, "spatial_merge_size": 2, "out_hidden_size": SIZES["hidden_size"],
            "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2],
        },
        image_token_id=N_VOCAB - 3, vision_start_token_id=N_VOCAB - 5,
        vision_end_token_id=N_VOCAB - 4, video_token_id=N_VOCAB - 6, tie_word_embeddings=True,
    )  # fmt: skip


QWEN35 = next(family for family in LINEARS if family.name == "qwen35")


def qwen35_config() -> Config:
    text = QWEN35.config().to_dict() | {"vocab_size": N_VOCAB, "max_position_embeddings": 512}
    whole = qwen3vl_config().to_dict()
    vision = whole["vision_config"]
    for name in ("deepstack_visual_indexes", "model_type"):
        vision.pop(name)
    controls = {name: value for name, value in whole.items() if name.endswith("_token_id")}
    return Qwen3_5Config(text_config=text, vision_config=vision, **controls)


def qwen_text(c: Config) -> dict[str, Any]:
    sections = [*c.rope_parameters["mrope_section"], 0]
    heads = head_sizes(c) if hasattr(c, "head_dim") else {}
    return {**sizes(c), **heads, **rope_base(c), "rope.dimension_sections": sections}


def qwen3vl_tower(config: Config) -> dict[str, Any]:
    c = config.vision_config
    return {
        **tower_sizes(config),
        "clip.projector_type": "qwen3vl_merger",
        "clip.vision.image_size": 6 * c.patch_size,
        "clip.vision.spatial_merge_size": c.spatial_merge_size,
        "clip.vision.is_deepstack_layers": [
            n in getattr(c, "deepstack_visual_indexes", ()) for n in range(c.depth)
        ],
        "clip.vision.image_min_pixels": QWEN_PIXELS[0],
        "clip.vision.image_max_pixels": QWEN_PIXELS[1],
    }


QWEN_PIXELS = 256, 4096
"""Bounds of the sizes of pictures."""

QWEN = r"model\.visual\."
TWO_FRAMES: tuple[str, Parts] = (
    QWEN + r"patch_embed\.proj\.weight",
    lambda _, values, c: {
        "v.patch_embd.weight": values[:, :, 0],
        "v.patch_embd.weight.1": values[:, :, 1],
    },
)
QWEN3VL_TOWER: tuple[tuple[str, str | Parts], ...] = (
    TWO_FRAMES,
    (QWEN + r"patch_embed\.proj\.bias", "v.patch_embd.bias"),
    (QWEN + r"pos_embed\.weight", "v.position_embd.weight"),
    (QWEN + r"blocks\.(\d+)\.norm(\d)\.(\w+)", r"v.blk.\1.ln\2.\3"),
    (QWEN + r"blocks\.(\d+)\.attn\.qkv\.(\w+)", r"v.blk.\1.attn_qkv.\2"),
    (QWEN + r"blocks\.(\d+)\.attn\.proj\.(\w+)", r"v.blk.\1.attn_out.\2"),
    (QWEN + r"blocks\.(\d+)\.mlp\.linear_fc1\.(\w+)", r"v.blk.\1.ffn_up.\2"),
    (QWEN + r"blocks\.(\d+)\.mlp\.linear_fc2\.(\w+)", r"v.blk.\1.ffn_down.\2"),
    (QWEN + r"merger\.norm\.(\w+)", r"v.post_ln.\1"),
    (QWEN + r"merger\.linear_fc1\.(\w+)", r"mm.0.\1"),
    (QWEN + r"merger\.linear_fc2\.(\w+)", r"mm.2.\1"),
    (
        QWEN + r"deepstack_merger_list\.(\d)\.(?:linear_)?(\w+)\.(\w+)",
        lambda found, values, c: {
            f"v.deepstack.{c.vision_config.deepstack_visual_indexes[int(found[1])]}.{found[2]}"
            f".{found[3]}": values
        },
    ),
)  # fmt: skip


def qwen_pixels(inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return pictures of patches that lie in blocks of 2 x 2, twice each."""
    found, first = [], 0
    for _, rows, columns in inputs["image_grid_thw"].tolist():
        cut = inputs["pixel_values"][first : first + rows * columns]
        blocks = cut.reshape(rows // 2, columns // 2, 2, 2, 3, 2, 4, 4)[:, :, :, :, :, 0]
        found.append(blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * 4, columns * 4))
        first += rows * columns
    return found


def qwen_features(model: Any, inputs: Mapping[str, Any]) -> Array:
    with torch.no_grad():
        found = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    parts = [found.pooler_output, *getattr(found, "deepstack_features", ())]
    return torch.cat([torch.cat(list(part)) for part in parts], dim=1).numpy()


def qwen_written(inputs: Mapping[str, Any]) -> list[str]:
    counts = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]]
    return [f"<|vision_start|>{n * '<|image_pad|>'}<|vision_end|>" for n in counts]


QWEN_CONTROLS = (
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|im_start|>", "<|im_end|>",
)  # fmt: skip
QWEN_TAKES = ("pixel_values", "image_grid_thw", "mm_token_type_ids")
QWEN_PROCESSOR = Qwen2VLImageProcessorPil(
    patch_size=4, image_mean=HALF, image_std=HALF,
    size={"shortest_edge": QWEN_PIXELS[0], "longest_edge": QWEN_PIXELS[1]},
)  # fmt: skip


def qwen25vl_config() -> Config:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    return Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": rope},
        vision_config={
            "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48,
            "patch_size": 4, "spatial_merge_size": 2, "window_size": 16,
            "out_hidden_size": SIZES["hidden_size"], "fullatt_block_indexes": [1],
        },
        image_token_id=N_VOCAB - 3, vision_start_token_id=N_VOCAB - 5,
        vision_end_token_id=N_VOCAB - 4, video_token_id=N_VOCAB - 6, tie_word_embeddings=True,
    )  # fmt: skip


def qwen25vl_tower(config: Config) -> dict[str, Any]:
    c = config.vision_config
    return {
        **tower_sizes(config),
        "clip.use_gelu": False,
        "clip.use_silu": True,
        "clip.projector_type": "qwen2.5vl_merger",
        "clip.vision.image_size": 560,
        "clip.vision.n_wa_pattern": c.fullatt_block_indexes[0] + 1,
        "clip.vision.window_size": c.window_size,
        "clip.vision.image_min_pixels": QWEN_PIXELS[0],
        "clip.vision.image_max_pixels": QWEN_PIXELS[1],
    }


def separated(found: re.Match[str], values: Array, c: Config) -> dict[str, Array]:
    """Return queries', keys' and values' part of a fused tensor, as its converter writes them."""
    parts = np.split(values, 3)
    return {
        f"v.blk.{found[1]}.attn_{name}.{found[2]}": part
        for name, part in zip("qkv", parts, strict=True)
    }


QWEN25VL_TOWER: tuple[tuple[str, str | Parts], ...] = (
    TWO_FRAMES,
    (QWEN + r"blocks\.(\d+)\.norm(\d)\.weight", r"v.blk.\1.ln\2.weight"),
    (QWEN + r"blocks\.(\d+)\.attn\.qkv\.(\w+)", separated),
    (QWEN + r"blocks\.(\d+)\.attn\.proj\.(\w+)", r"v.blk.\1.attn_out.\2"),
    (QWEN + r"blocks\.(\d+)\.mlp\.(\w+)_proj\.(\w+)", r"v.blk.\1.ffn_\2.\3"),
    (QWEN + r"merger\.ln_q\.weight", "v.post_ln.weight"),
    (QWEN + r"merger\.mlp\.(\d)\.(\w+)", r"mm.\1.\2"),
)


FAMILIES = [
    SeeingFamily(
        "qwen3vl",
        Family("qwen3vl", "qwen3vl", None, qwen3vl_config, qwen_text, DENSE),
        qwen3vl_config, qwen3vl_tower, QWEN3VL_TOWER, QWEN_CONTROLS, CHAT_TEMPLATE,
        QWEN_PROCESSOR, "<|image_pad|>", qwen_written, qwen_pixels, qwen_features, QWEN_TAKES,
    ),
    SeeingFamily(
        "qwen35",
        QWEN35,
        qwen35_config, qwen3vl_tower, QWEN3VL_TOWER, QWEN_CONTROLS, CHAT_TEMPLATE,
        QWEN_PROCESSOR, "<|image_pad|>", qwen_written, qwen_pixels, qwen_features, QWEN_TAKES,
    ),
    SeeingFamily(
        "qwen25vl",
        Family("qwen2vl", "qwen2vl", None, qwen25vl_config, qwen_text, DENSE),
        qwen25vl_config, qwen25vl_tower, QWEN25VL_TOWER, QWEN_CONTROLS, CHAT_TEMPLATE,
        QWEN_PROCESSOR, "<|image_pad|>", qwen_written, qwen_pixels, qwen_features, QWEN_TAKES,
    ),
]  # fmt: skip
