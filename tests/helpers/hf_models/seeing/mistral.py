"""Mistral Small 3.1 with its pictures."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Mistral3Config, PixtralImageProcessorPil

from tests.helpers.hf_models.family import Array, Config, Family
from tests.helpers.hf_models.seeing.family import (
    CHAT_TEMPLATE,
    LLAMA,
    N_VOCAB,
    TEXT,
    Parts,
    SeeingFamily,
    llama_text,
    tower_sizes,
)

CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def mistral3_config() -> Config:
    return Mistral3Config(
        text_config=TEXT | {"model_type": "mistral", "head_dim": 16},
        vision_config={
            "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 48, "patch_size": 4,
            "hidden_act": "silu",
        },
        image_token_index=N_VOCAB - 5, spatial_merge_size=2, tie_word_embeddings=True,
    )  # fmt: skip


def mistral3_tower(config: Config) -> dict[str, Any]:
    c = config.vision_config
    return {
        **tower_sizes(config, **CLIP),
        "clip.use_gelu": False,
        "clip.use_silu": True,
        "clip.projector_type": "pixtral",
        "clip.vision.image_size": c.image_size,
        "clip.vision.attention.layer_norm_epsilon": 1e-5,
        "clip.vision.spatial_merge_size": config.spatial_merge_size,
    }


def in_pairs(found: re.Match[str], values: Array, c: Config) -> dict[str, Array]:
    """Return queries' or keys' rows such that neighbours rotate, as converters write them."""
    halves = values.reshape(c.vision_config.num_attention_heads, 2, -1, values.shape[-1])
    name = f"v.blk.{found[1]}.attn_{found[2]}.weight"
    return {name: halves.swapaxes(1, 2).reshape(values.shape)}


PIXTRAL = r"model\.vision_tower\."
PIXTRAL_LAYER = PIXTRAL + r"transformer\.layers\.(\d+)\."
PROJECTOR = r"model\.multi_modal_projector\."
MISTRAL3_TOWER: tuple[tuple[str, str | Parts], ...] = (
    (PIXTRAL + r"patch_conv\.weight", "v.patch_embd.weight"),
    (PIXTRAL + r"ln_pre\.weight", "v.pre_ln.weight"),
    (PIXTRAL_LAYER + r"attention_norm\.weight", r"v.blk.\1.ln1.weight"),
    (PIXTRAL_LAYER + r"ffn_norm\.weight", r"v.blk.\1.ln2.weight"),
    (PIXTRAL_LAYER + r"attention\.(q|k)_proj\.weight", in_pairs),
    (PIXTRAL_LAYER + r"attention\.v_proj\.weight", r"v.blk.\1.attn_v.weight"),
    (PIXTRAL_LAYER + r"attention\.o_proj\.weight", r"v.blk.\1.attn_out.weight"),
    (PIXTRAL_LAYER + r"feed_forward\.(\w+)_proj\.weight", r"v.blk.\1.ffn_\2.weight"),
    (PROJECTOR + r"norm\.weight", "mm.input_norm.weight"),
    (PROJECTOR + r"patch_merger\.merging_layer\.weight", "mm.patch_merger.weight"),
    (PROJECTOR + r"linear_(\d)\.weight", r"mm.\1.weight"),
)
BREAK = N_VOCAB - 4
"""Id of the token between rows of a picture."""

EMBEDDING = "model.language_model.embed_tokens.weight"


def mistral3_grids(inputs: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the rows and columns of each picture's tokens."""
    return [(height // 8, width // 8) for height, width in inputs["image_sizes"].tolist()]


def mistral3_written(inputs: Mapping[str, Any]) -> list[str]:
    rows = [[columns * "[IMG]"] * n for n, columns in mistral3_grids(inputs)]
    return ["[IMG_BREAK]".join(lines) + "[IMG_END]" for lines in rows]


def mistral3_pixels(inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    sizes = inputs["image_sizes"].tolist()
    return [x[:, :h, :w] for x, (h, w) in zip(inputs["pixel_values"], sizes, strict=True)]


def mistral3_features(model: Any, inputs: Mapping[str, Any]) -> Array:
    """Return the features with the embedding of the break between rows."""
    with torch.no_grad():
        found = model.model.get_image_features(
            inputs["pixel_values"], inputs["image_sizes"], vision_feature_layer=-1
        ).pooler_output
    ends = model.get_input_embeddings().weight[BREAK].detach()
    lines = []
    for x, (rows, columns) in zip(found, mistral3_grids(inputs), strict=True):
        with_ends = [torch.cat([line, ends[None]]) for line in x.reshape(rows, columns, -1)]
        lines.append(torch.cat(with_ends)[:-1])
    return torch.cat(lines).numpy()


FAMILIES = [
    SeeingFamily(
        "mistral3",
        Family("mistral", "llama", None, mistral3_config, llama_text, LLAMA),
        mistral3_config, mistral3_tower, MISTRAL3_TOWER,
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|im_start|>", "<|im_end|>"), CHAT_TEMPLATE,
        PixtralImageProcessorPil(
            patch_size={"height": 8, "width": 8}, size={"longest_edge": 48}
        ),
        "[IMG]", mistral3_written, mistral3_pixels, mistral3_features,
        ("pixel_values", "image_sizes"),
        lambda state: {"v.token_embd.img_break": state[EMBEDDING][BREAK]},
        ("[IMG_BREAK]",),
    ),
]  # fmt: skip
