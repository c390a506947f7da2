"""Idefics 3 and InternVL, which cut pictures into tiles."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    GotOcr2ImageProcessorPil,
    Idefics3Config,
    Idefics3ImageProcessorPil,
    InternVLConfig,
)

from tests.helpers.hf_models.family import Array, Config, Family
from tests.helpers.hf_models.llama import FAMILIES as LLAMAS
from tests.helpers.hf_models.parts import DENSE
from tests.helpers.hf_models.seeing.family import (
    CHAT_TEMPLATE,
    LLAMA,
    N_VOCAB,
    SIGLIP,
    TEXT,
    SeeingFamily,
    llama_text,
    tower_sizes,
)


def idefics3_config() -> Config:
    return Idefics3Config(
        text_config=TEXT | {"model_type": "llama", "head_dim": 16},
        vision_config={
            "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 3, "image_size": 16, "patch_size": 4,
        },
        image_token_id=N_VOCAB - len(IDEFICS3_CONTROLS), scale_factor=2, tie_word_embeddings=True,
    )  # fmt: skip


IDEFICS3_CONTROLS = (
    "<image>", "<fake_token_around_image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    "<|im_start|>", "<|im_end|>",
)  # fmt: skip


def idefics3_tower(config: Config) -> dict[str, Any]:
    c = config.vision_config
    return {
        **tower_sizes(config),
        "clip.projector_type": "idefics3",
        "clip.vision.image_size": c.image_size,
        "clip.vision.projector.scale_factor": config.scale_factor,
        "clip.vision.preproc_image_size": 32,
    }


IDEFICS3_TOWER = (
    *((theirs.replace("vision_tower", "vision_model"), ours) for theirs, ours in SIGLIP),
    (r"model\.connector\.modality_projection\.proj\.weight", "mm.model.fc.weight"),
)

IDEFICS3_PROCESSOR = Idefics3ImageProcessorPil(
    size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
)


def idefics3_written(inputs: Mapping[str, Any]) -> list[str]:
    """Return tiles with their place, and the whole picture (`Idefics3Processor`)."""
    found = []
    for rows, columns in zip(inputs["rows"][0], inputs["cols"][0], strict=True):
        around, image = "<fake_token_around_image>", 4 * "<image>"
        lines = (
            "".join(f"{around}<row_{row}_col_{column}>{image}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        )
        text = "".join(line + "\n" for line in lines) + ("\n" if rows else "")
        found.append(text + around + "<global-img>" + image + around)
    return found


def idefics3_features(model: Any, inputs: Mapping[str, Any]) -> Array:
    with torch.no_grad():
        found = model.model.get_image_features(
            inputs["pixel_values"], inputs["pixel_attention_mask"]
        ).pooler_output
    return torch.cat(list(found)).numpy()


def internvl_config() -> Config:
    return InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config={
            "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 3, "image_size": 16, "patch_size": 4, "attention_bias": True,
            "use_qk_norm": True,
        },
        image_token_id=N_VOCAB - 1, image_seq_length=4, tie_word_embeddings=True,
    )  # fmt: skip


def internvl_tower(config: Config) -> dict[str, Any]:
    c = config.vision_config
    return {
        **tower_sizes(config, **IMAGENET),
        "clip.projector_type": "internvl",
        "clip.vision.image_size": c.image_size[0],
        "clip.vision.patch_size": c.patch_size[0],
        "clip.vision.projector.scale_factor": 2,
        "clip.vision.preproc_min_tiles": 1,
        "clip.vision.preproc_max_tiles": 4,
    }


IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
INTERNVIT = r"model\.vision_tower\."
INTERNVIT_LAYER = INTERNVIT + r"encoder\.layer\.(\d+)\."
INTERNVL_TOWER = (
    (INTERNVIT + r"embeddings\.cls_token", "v.class_embd"),
    (INTERNVIT + r"embeddings\.position_embeddings", "v.position_embd.weight"),
    (INTERNVIT + r"embeddings\.patch_embeddings\.projection\.(\w+)", r"v.patch_embd.\1"),
    (INTERNVIT_LAYER + r"attention\.(q|k|v)_proj\.(\w+)", r"v.blk.\1.attn_\2.\3"),
    (INTERNVIT_LAYER + r"attention\.(q|k)_norm\.(\w+)", r"v.blk.\1.attn_\2_norm.\3"),
    (INTERNVIT_LAYER + r"attention\.projection_layer\.(\w+)", r"v.blk.\1.attn_out.\2"),
    (INTERNVIT_LAYER + r"layernorm_before\.(\w+)", r"v.blk.\1.ln1.\2"),
    (INTERNVIT_LAYER + r"layernorm_after\.(\w+)", r"v.blk.\1.ln2.\2"),
    (INTERNVIT_LAYER + r"lambda_(\d)", r"v.blk.\1.ls\2.weight"),
    (INTERNVIT_LAYER + r"mlp\.fc1\.(\w+)", r"v.blk.\1.ffn_up.\2"),
    (INTERNVIT_LAYER + r"mlp\.fc2\.(\w+)", r"v.blk.\1.ffn_down.\2"),
    (r"model\.multi_modal_projector\." + r"layer_norm\.(\w+)", r"mm.model.mlp.0.\1"),
    (r"model\.multi_modal_projector\." + r"linear_1\.(\w+)", r"mm.model.mlp.1.\1"),
    (r"model\.multi_modal_projector\." + r"linear_2\.(\w+)", r"mm.model.mlp.3.\1"),
)


def internvl_features(model: Any, inputs: Mapping[str, Any]) -> Array:
    with torch.no_grad():
        found = model.model.get_image_features(
            inputs["pixel_values"],
            vision_feature_layer=-1,
            vision_feature_select_strategy="default",
        ).pooler_output
    return found.flatten(0, 1).numpy()


QWEN2 = next(family for family in LLAMAS if family.name == "qwen2")

FAMILIES = [
    SeeingFamily(
        "idefics3",
        Family("llama", "llama", None, idefics3_config, llama_text, LLAMA),
        idefics3_config, idefics3_tower, IDEFICS3_TOWER, IDEFICS3_CONTROLS, CHAT_TEMPLATE,
        lambda images, **options: IDEFICS3_PROCESSOR(
            [images], return_row_col_info=True, **options
        ),
        "<image>", idefics3_written, lambda inputs: list(inputs["pixel_values"][0]),
        idefics3_features, ("pixel_values", "pixel_attention_mask"),
    ),
    SeeingFamily(
        "internvl",
        Family("qwen2", "qwen2", None, internvl_config, QWEN2.metadata, DENSE),
        internvl_config, internvl_tower, INTERNVL_TOWER,
        ("<img>", "</img>", "<IMG_CONTEXT>"), CHAT_TEMPLATE,
        GotOcr2ImageProcessorPil(
            size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=4, **IMAGENET
        ),
        "<IMG_CONTEXT>",
        lambda inputs: [f"<img>{4 * n * '<IMG_CONTEXT>'}</img>" for n in inputs["num_patches"]],
        lambda inputs: list(inputs["pixel_values"]), internvl_features, ("pixel_values",),
    ),
]  # fmt: skip
