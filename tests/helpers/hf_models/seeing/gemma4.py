"""Gemma 4 with its pictures: 26B and 31B, E2B and E4B, and 12B, which has no tower."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma4Config,
    Gemma4ImageProcessorPil,
    Gemma4UnifiedConfig,
    Gemma4UnifiedTextConfig,
)

from tests.helpers.hf_models.family import Array, Config, Family
from tests.helpers.hf_models.gemma import FAMILIES as GEMMAS
from tests.helpers.hf_models.seeing.family import N_VOCAB, Parts, SeeingFamily, tower_sizes

POOL, PATCH, MAX_TOKENS = 3, 4, 70
CELL = POOL * PATCH

CONTROLS = ("<|image>", "<image|>", "<|image|>", "<|turn>", "<turn|>")
IDS = {
    "image_token_id": N_VOCAB - 3, "boi_token_id": N_VOCAB - 5, "eoi_token_id": N_VOCAB - 4,
    "audio_token_id": N_VOCAB - 6, "video_token_id": N_VOCAB - 7, "tie_word_embeddings": True,
}  # fmt: skip

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<turn|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)


def text_of(name: str) -> Family:
    return next(family for family in GEMMAS if family.name == name)


def text_config(name: str, **changes: Any) -> Config:
    config = text_of(name).config()
    for key, value in {
        "vocab_size": N_VOCAB,
        "vocab_size_per_layer_input": N_VOCAB,
        **changes,
    }.items():
        setattr(config, key, value)
    return config


VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "patch_size": PATCH, "pooling_kernel_size": POOL,
    "position_embedding_size": 256,
}  # fmt: skip


def large_config() -> Config:
    """Return the configuration of a model whose tower is without bounds, as 26B and 31B."""
    text = text_config("gemma4", use_bidirectional_attention="vision")
    return Gemma4Config(text_config=text, vision_config=VISION | {"standardize": True}, **IDS)


def small_config() -> Config:
    """Return the configuration of a model with inputs of each layer, as E2B and E4B."""
    vision = VISION | {"use_clipped_linears": True}
    return Gemma4Config(text_config=text_config("gemma4-shared-kv"), vision_config=vision, **IDS)


def unified_config() -> Config:
    text = text_config("gemma4", use_bidirectional_attention="vision").to_dict()
    for name in list(text):
        if name not in Gemma4UnifiedTextConfig().to_dict() and name != "global_head_dim":
            text.pop(name)
    text.pop("model_type", None)
    vision = {
        "patch_size": PATCH, "pooling_kernel_size": POOL, "mm_embed_dim": text["hidden_size"],
        "mm_posemb_size": 96, "output_proj_dims": text["hidden_size"],
    }  # fmt: skip
    found = Gemma4UnifiedConfig(text_config=text, vision_config=vision, **IDS)
    found.text_config.hidden_size_per_layer_input = 0  # which the keys of Gemma 4 have
    return found


COMMON = {
    "clip.vision.image_size": 224,
    "clip.vision.image_max_pixels": MAX_TOKENS * CELL**2,
    "clip.vision.image_mean": [0.0] * 3,
    "clip.vision.image_std": [1.0] * 3,
}


def gemma4_tower(config: Config) -> dict[str, Any]:
    return {**tower_sizes(config), **COMMON, "clip.vision.projector_type": "gemma4v"}


def unified_tower(config: Config) -> dict[str, Any]:
    n_text = config.get_text_config().hidden_size
    return {
        **COMMON,
        "clip.vision.projector_type": "gemma4uv",
        "clip.vision.patch_size": PATCH,
        "clip.vision.embedding_length": n_text,
        "clip.vision.feed_forward_length": 0,
        "clip.vision.block_count": 0,
        "clip.vision.attention.head_count": 0,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.projection_dim": n_text,
    }


def by_channel(side: int) -> Array:
    """Return the places of a patch's numbers in a file, of all of red first, in `transformers`."""
    return np.arange(side * side * 3).reshape(side, side, 3).transpose(2, 0, 1).reshape(-1)


PATCHES: tuple[str, Parts] = (
    r"model\.vision_tower\.patch_embedder\.input_proj\.weight",
    lambda _, values, c: {
        "v.patch_embd.weight": values[:, by_channel(PATCH)].reshape(-1, 3, PATCH, PATCH)
    },
)
LAYER = r"model\.vision_tower\.encoder\.layers\.(\d+)\."
PROJECTION = r"model\.(?:\w+\.)*embedding_projection\.weight"
BOUND = r"((?:input|output)_(?:min|max))"


def bound(name: str) -> Callable[..., dict[str, Array]]:
    """Return a function that writes the bound of a matrix, which has one number."""
    return lambda found, values, _: {f"v.blk.{found[1]}.{name}_{found[2]}.{found[3]}": values[None]}


TOWER: tuple[tuple[str, str | Parts], ...] = (
    PATCHES,
    (r"model\.vision_tower\.patch_embedder\.position_embedding_table", "v.position_embd.weight"),
    (r"model\.vision_tower\.std_(\w+)", r"v.std_\1"),
    (LAYER + r"self_attn\.(q|k|v)_proj\.linear\.weight", r"v.blk.\1.attn_\2.weight"),
    (LAYER + r"self_attn\.o_proj\.linear\.weight", r"v.blk.\1.attn_out.weight"),
    (LAYER + r"self_attn\.(q|k)_norm\.weight", r"v.blk.\1.attn_\2_norm.weight"),
    (LAYER + r"self_attn\.(q|k|v)_proj\." + BOUND, bound("attn")),
    (
        LAYER + r"self_attn\.o_proj\." + BOUND,
        lambda found, values, _: {f"v.blk.{found[1]}.attn_out.{found[2]}": values[None]},
    ),
    (LAYER + r"mlp\.(gate|up|down)_proj\.linear\.weight", r"v.blk.\1.ffn_\2.weight"),
    (LAYER + r"mlp\.(gate|up|down)_proj\." + BOUND, bound("ffn")),
    (LAYER + r"input_layernorm\.weight", r"v.blk.\1.ln1.weight"),
    (LAYER + r"post_attention_layernorm\.weight", r"v.blk.\1.attn_post_norm.weight"),
    (LAYER + r"pre_feedforward_layernorm\.weight", r"v.blk.\1.ln2.weight"),
    (LAYER + r"post_feedforward_layernorm\.weight", r"v.blk.\1.ffn_post_norm.weight"),
    (PROJECTION, "mm.input_projection.weight"),
)

EMBEDDER = r"model\.\w+\."
UNIFIED: tuple[tuple[str, str | Parts], ...] = (
    (PROJECTION, "mm.input_projection.weight"),
    (
        EMBEDDER + r"patch_dense\.weight",
        lambda _, values, c: {"v.patch_embd.weight": values[:, by_channel(CELL)]},
    ),
    (EMBEDDER + r"patch_dense\.bias", "v.patch_embd.bias"),
    (
        EMBEDDER + r"patch_ln1\.(\w+)",
        lambda found, values, c: {f"v.patch_norm.1.{found[1]}": values[by_channel(CELL)]},
    ),
    (EMBEDDER + r"patch_ln2\.(\w+)", r"v.patch_norm.2.\1"),
    (EMBEDDER + r"pos_norm\.(\w+)", r"v.patch_norm.3.\1"),
    (
        EMBEDDER + r"pos_embedding",
        lambda _, values, c: {"v.position_embd.weight": values.transpose(1, 0, 2)},
    ),
)


def gemma4_pixels(inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the pictures of patches, behind which there are others up to the largest number."""
    found = []
    for cut, places in zip(inputs["pixel_values"], inputs["image_position_ids"], strict=True):
        columns, rows = (int(n) + 1 for n in places.amax(0))
        grid = cut[: rows * columns].reshape(rows, columns, PATCH, PATCH, 3)
        found.append(grid.permute(4, 0, 2, 1, 3).reshape(3, rows * PATCH, columns * PATCH))
    return found


def gemma4_features(model: Any, inputs: Mapping[str, Any]) -> Array:
    with torch.no_grad():
        found = model.model.get_image_features(
            inputs["pixel_values"], inputs["image_position_ids"]
        ).pooler_output
    return torch.cat(list(found)).numpy()


def gemma4_written(inputs: Mapping[str, Any]) -> list[str]:
    counts = [int(n) for n in inputs["num_soft_tokens_per_image"]]
    return [f"\n\n<|image>{n * '<|image|>'}<image|>\n\n" for n in counts]


PROCESSOR = Gemma4ImageProcessorPil(
    patch_size=PATCH, max_soft_tokens=MAX_TOKENS, pooling_kernel_size=POOL
)


def in_large_patches(images: Any, **options: Any) -> Mapping[str, Any]:
    """Return what the processor makes of pictures, with its patches joined 3 x 3."""
    inputs = dict(PROCESSOR(images, **options))
    joined, places = [], []
    for pixels in gemma4_pixels(inputs):
        rows, columns = pixels.shape[1] // CELL, pixels.shape[2] // CELL
        cut = pixels.reshape(3, rows, CELL, columns, CELL).permute(1, 3, 2, 4, 0)
        grid = torch.ones(rows, columns).nonzero().flip(-1)
        n_more = MAX_TOKENS - rows * columns
        joined.append(torch.nn.functional.pad(cut.reshape(rows * columns, -1), (0, 0, 0, n_more)))
        places.append(torch.nn.functional.pad(grid, (0, 0, 0, n_more), value=-1))
    inputs["small"] = {name: inputs[name] for name in ("pixel_values", "image_position_ids")}
    return inputs | {
        "pixel_values": torch.stack(joined), "image_position_ids": torch.stack(places),
    }  # fmt: skip


TAKES = ("pixel_values", "image_position_ids", "mm_token_type_ids")

FAMILIES = [
    SeeingFamily(
        name, text, config, keys, names, CONTROLS, TEMPLATE, processor, "<|image|>",
        gemma4_written, pixels, gemma4_features, TAKES, has_own_masks=config is unified_config,
    )
    for name, text, config, keys, names, processor, pixels in (
        ("gemma4", text_of("gemma4"), large_config, gemma4_tower, TOWER, PROCESSOR, gemma4_pixels),
        (
            "gemma4-small", text_of("gemma4-shared-kv"), small_config, gemma4_tower, TOWER,
            PROCESSOR, gemma4_pixels,
        ),
        (
            "gemma4-unified", text_of("gemma4"), unified_config, unified_tower, UNIFIED,
            in_large_patches, lambda inputs: gemma4_pixels(inputs["small"]),
        ),
    )
]  # fmt: skip
