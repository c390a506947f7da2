"""Gemma 3 with its pictures."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Gemma3Config, Gemma3ImageProcessorPil

from tests.helpers.hf_models.family import Array, Config
from tests.helpers.hf_models.gemma import FAMILIES as GEMMAS
from tests.helpers.hf_models.seeing.family import N_VOCAB, SIGLIP, SeeingFamily, tower_sizes


def gemma3_tower(config: Config) -> dict[str, Any]:
    c = config.vision_config
    return {
        **tower_sizes(config),
        "clip.projector_type": "gemma3",
        "clip.vision.image_size": c.image_size,
    }


def gemma3_config() -> Config:
    (text,) = (family for family in GEMMAS if family.name == "gemma3")
    inner = text.config()
    inner.vocab_size = N_VOCAB
    return Gemma3Config(
        text_config=inner,
        vision_config={
            "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 3, "image_size": 64, "patch_size": 4,
            "vision_use_head": False,
        },
        mm_tokens_per_image=16,
        image_token_id=N_VOCAB - 3, boi_token_id=N_VOCAB - 5, eoi_token_id=N_VOCAB - 4,
        tie_word_embeddings=True,
    )  # fmt: skip


def gemma3_features(model: Any, inputs: Mapping[str, Any]) -> Array:
    with torch.no_grad():
        found = model.model.get_image_features(inputs["pixel_values"]).pooler_output
    return found.flatten(0, 1).numpy()


GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

FAMILIES = [
    SeeingFamily(
        "gemma3",
        next(family for family in GEMMAS if family.name == "gemma3"),
        gemma3_config,
        gemma3_tower,
        (
            *SIGLIP,
            (r"model\.multi_modal_projector\.mm_soft_emb_norm\.weight", "mm.soft_emb_norm.weight"),
            (
                r"model\.multi_modal_projector\.mm_input_projection_weight",
                "mm.input_projection.weight",
            ),
        ),
        (
            "<start_of_image>", "<end_of_image>", "<image_soft_token>",
            "<start_of_turn>", "<end_of_turn>",
        ),
        GEMMA_TEMPLATE,
        Gemma3ImageProcessorPil(size={"height": 64, "width": 64}),
        "<image_soft_token>",
        lambda inputs: [
            "\n\n<start_of_image>" + 16 * "<image_soft_token>" + "<end_of_image>\n\n"
        ] * len(inputs["pixel_values"]),
        lambda inputs: list(inputs["pixel_values"]),
        gemma3_features,
        ("pixel_values", "token_type_ids"),
    ),
]  # fmt: skip
