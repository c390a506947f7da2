"""Models that see: a tiny `transformers` model, written as a text model and its mmproj file."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ImageProcessorPil,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3VLConfig,
)

from tests.helpers.hf_models.family import Array, Config, Family, randomise
from tests.helpers.hf_models.gemma import FAMILIES as GEMMAS
from tests.helpers.hf_models.linear_attention import FAMILIES as LINEARS
from tests.helpers.hf_models.parts import DENSE, SIZES, head_sizes, rope_base, sizes
from tests.helpers.tiny_gguf import CONTROL, finish, tiny_vocabulary, value_type

N_VOCAB = 340
"""Tokens of the text models: bytes, some words, and the control tokens at the end."""

Parts = Callable[[re.Match[str], Array, Config], Mapping[str, Array]]
"""Function that makes tensors of a file of a parameter whose name matches."""

HALF = [0.5, 0.5, 0.5]


@dataclass(frozen=True)
class SeeingFamily:
    """A family of models that see, with one tiny model.

    Attributes:
        text: family of the text model.
        config: returns the configuration of the whole model.
        tower_keys: returns the keys of the mmproj file, from the configuration.
        tower_names: pairs of a regular expression on parameters' names and the name in the file, or
            a function that makes several tensors of the match, the parameter and the configuration.
        controls: control tokens of the vocabulary.
        template: chat template.
        processor: the image processor of `transformers`.
        holder: token that stands for a part of a picture in the ids of `transformers`.
        around: texts before and behind the tokens of a picture.
        n_tokens: returns the number of tokens of each picture, from what the processor returns.
        pixels: returns the pixels of each picture, (3, height, width), from the same.
        features: returns what the tower makes of them, (tokens, n_embd), from the same.
        types_name: name of the argument that tells `transformers` which tokens are of pictures.
    """

    name: str
    text: Family
    config: Callable[[], Config]
    tower_keys: Callable[[Config], Mapping[str, Any]]
    tower_names: tuple[tuple[str, str | Parts], ...]
    controls: tuple[str, ...]
    template: str
    processor: Any
    holder: str
    around: tuple[str, str]
    n_tokens: Callable[[Mapping[str, Any]], list[int]]
    pixels: Callable[[Mapping[str, Any]], list[torch.Tensor]]
    features: Callable[[Any, Mapping[str, Any]], Array]
    types_name: str

    def build(self, folder: Path) -> Any:
        """Write `model.gguf` and `mmproj.gguf` with random weights; return the model."""
        config = self.config()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForImageTextToText.from_config(
                config, attn_implementation="eager", dtype=torch.float32
            ).eval()
        randomise(model, np.random.default_rng(0))
        state = {name: value.numpy() for name, value in model.state_dict().items()}
        self._write_text(folder / "model.gguf", config.get_text_config(), state)
        self._write_tower(folder / "mmproj.gguf", config, state)
        return model

    def _write_text(self, path: Path, config: Config, state: Mapping[str, Array]) -> None:
        arch = self.text.arch
        writer = GGUFWriter(path, arch)
        keys = {f"{arch}.{key}": value for key, value in self.text.metadata(config).items()}
        vocabulary = tiny_vocabulary(arch, N_VOCAB)
        tokens = vocabulary["tokenizer.ggml.tokens"]
        for index, token in enumerate(self.controls, N_VOCAB - len(self.controls)):
            tokens[index] = token
            vocabulary["tokenizer.ggml.token_type"][index] = CONTROL
        keys |= vocabulary | {"tokenizer.chat_template": self.template}
        keys["tokenizer.ggml.add_space_prefix"] = False
        for key, value in keys.items():
            writer.add_key_value(key, value, value_type(value))
        own = {
            name.replace("language_model.", ""): value
            for name, value in state.items()
            if "language_model." in name or name.startswith("lm_head")
        }
        for name, values in self.text.convert(config, own).items():
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        finish(writer)

    def _write_tower(self, path: Path, config: Config, state: Mapping[str, Array]) -> None:
        writer = GGUFWriter(path, "clip")
        keys = {"clip.has_vision_encoder": True, **self.tower_keys(config)}
        for key, value in keys.items():
            writer.add_key_value(key, value, value_type(value))
        for name, values in state.items():
            if "language_model." in name or name.startswith("lm_head"):
                continue
            for found, value in self._of_tower(name, values, config).items():
                writer.add_tensor(found, np.ascontiguousarray(value, np.float32))
        finish(writer)

    def _of_tower(self, name: str, values: Array, config: Config) -> Mapping[str, Array]:
        """Return the tensors of the mmproj file that a parameter makes."""
        for pattern, goal in self.tower_names:
            if found := re.fullmatch(pattern, name):
                if not isinstance(goal, str):
                    return goal(found, values, config)
                plus = 1.0 if goal in PLUS_ONE else 0.0
                return {re.sub(pattern, goal, name): values + plus}
        raise KeyError(name)


PLUS_ONE = ("mm.soft_emb_norm.weight",)
"""Norms to whose weights converters add one."""

SIGLIP = tuple(
    (rf"model\.vision_tower\.{theirs}", ours)
    for theirs, ours in (
        (r"embeddings\.patch_embedding\.(weight|bias)", r"v.patch_embd.\1"),
        (r"embeddings\.position_embedding\.weight", "v.position_embd.weight"),
        (r"encoder\.layers\.(\d+)\.layer_norm(\d)\.(\w+)", r"v.blk.\1.ln\2.\3"),
        (r"encoder\.layers\.(\d+)\.self_attn\.(q|k|v)_proj\.(\w+)", r"v.blk.\1.attn_\2.\3"),
        (r"encoder\.layers\.(\d+)\.self_attn\.out_proj\.(\w+)", r"v.blk.\1.attn_out.\2"),
        (r"encoder\.layers\.(\d+)\.mlp\.fc1\.(\w+)", r"v.blk.\1.ffn_up.\2"),
        (r"encoder\.layers\.(\d+)\.mlp\.fc2\.(\w+)", r"v.blk.\1.ffn_down.\2"),
        (r"post_layernorm\.(\w+)", r"v.post_ln.\1"),
    )
)


def tower_sizes(config: Config) -> dict[str, Any]:
    """Return the keys that all towers have."""
    c = config.vision_config
    return {
        "clip.vision.patch_size": c.patch_size,
        "clip.vision.embedding_length": c.hidden_size,
        "clip.vision.feed_forward_length": c.intermediate_size,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": HALF,
        "clip.vision.image_std": HALF,
        "clip.use_gelu": True,
    }


def gemma3_tower(config: Config) -> dict[str, Any]:
    c = config.vision_config
    return {
        **tower_sizes(config),
        "clip.projector_type": "gemma3",
        "clip.vision.image_size": c.image_size,
        "clip.vision.block_count": c.num_hidden_layers,
        "clip.vision.attention.head_count": c.num_attention_heads,
        "clip.vision.projection_dim": config.text_config.hidden_size,
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


def qwen3vl_text(c: Config) -> dict[str, Any]:
    sections = [*c.rope_parameters["mrope_section"], 0]
    return {**sizes(c), **head_sizes(c), **rope_base(c), "rope.dimension_sections": sections}


def qwen3vl_tower(config: Config) -> dict[str, Any]:
    c = config.vision_config
    return {
        **tower_sizes(config),
        "clip.projector_type": "qwen3vl_merger",
        "clip.vision.image_size": 6 * c.patch_size,
        "clip.vision.block_count": c.depth,
        "clip.vision.attention.head_count": c.num_heads,
        "clip.vision.projection_dim": c.out_hidden_size,
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
QWEN3VL_TOWER: tuple[tuple[str, str | Parts], ...] = (
    (
        QWEN + r"patch_embed\.proj\.weight",
        lambda _, values, c: {
            "v.patch_embd.weight": values[:, :, 0], "v.patch_embd.weight.1": values[:, :, 1],
        },
    ),
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


def qwen3vl_features(model: Any, inputs: Mapping[str, Any]) -> Array:
    with torch.no_grad():
        found = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    parts = [found.pooler_output, *getattr(found, "deepstack_features", ())]
    return torch.cat([torch.cat(list(part)) for part in parts], dim=1).numpy()


QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

SEEING = [
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
        ("\n\n<start_of_image>", "<end_of_image>\n\n"),
        lambda inputs: [16] * len(inputs["pixel_values"]),
        lambda inputs: list(inputs["pixel_values"]),
        gemma3_features,
        "token_type_ids",
    ),
    SeeingFamily(
        "qwen3vl",
        Family("qwen3vl", "qwen3vl", None, qwen3vl_config, qwen3vl_text, DENSE),
        qwen3vl_config,
        qwen3vl_tower,
        QWEN3VL_TOWER,
        ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|im_start|>", "<|im_end|>"),
        QWEN_TEMPLATE,
        Qwen2VLImageProcessorPil(
            patch_size=4, image_mean=HALF, image_std=HALF,
            size={"shortest_edge": QWEN_PIXELS[0], "longest_edge": QWEN_PIXELS[1]},
        ),
        "<|image_pad|>",
        ("<|vision_start|>", "<|vision_end|>"),
        lambda inputs: [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]],
        qwen_pixels,
        qwen3vl_features,
        "mm_token_type_ids",
    ),
    SeeingFamily(
        "qwen35",
        QWEN35,
        qwen35_config,
        qwen3vl_tower,
        QWEN3VL_TOWER,
        ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|im_start|>", "<|im_end|>"),
        QWEN_TEMPLATE,
        Qwen2VLImageProcessorPil(
            patch_size=4, image_mean=HALF, image_std=HALF,
            size={"shortest_edge": QWEN_PIXELS[0], "longest_edge": QWEN_PIXELS[1]},
        ),
        "<|image_pad|>",
        ("<|vision_start|>", "<|vision_end|>"),
        lambda inputs: [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]],
        qwen_pixels,
        qwen3vl_features,
        "mm_token_type_ids",
    ),
]  # fmt: skip
