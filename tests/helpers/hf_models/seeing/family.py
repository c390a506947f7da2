"""A family of models that see: a tiny `transformers` model, as a text model and its mmproj file."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from transformers import AutoModelForImageTextToText

from tests.helpers.hf_models.family import Array, Config, Family, randomise
from tests.helpers.hf_models.parts import DENSE, NEIGHBOURS, SIZES, rope_base, rope_size, sizes
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
        written: returns the text of each picture with that token, from what the processor returns.
        pixels: returns the pixels of each view of a picture, (3, height, width), from the same.
        features: returns what the tower makes of them, (tokens, n_embd), from the same.
        takes: names of what the model takes of what the processor returns, and of
            "mm_token_type_ids" or "token_type_ids", which tell it which tokens are of pictures.
        extras: returns further tensors of the mmproj file, from the model's parameters.
        breaks: tokens of texts in `transformers` that are parts of a picture here.
        has_own_masks: whether the model needs the masks that it makes for `generate`, as those of
            a single pass are others.
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
    written: Callable[[Mapping[str, Any]], list[str]]
    pixels: Callable[[Mapping[str, Any]], list[torch.Tensor]]
    features: Callable[[Any, Mapping[str, Any]], Array]
    takes: tuple[str, ...]
    extras: Callable[[Mapping[str, Array]], Mapping[str, Array]] = lambda _: {}
    breaks: tuple[str, ...] = ()
    has_own_masks: bool = False

    def id_of(self, control: str) -> int:
        """Return the id of a control token."""
        return N_VOCAB - len(self.controls) + self.controls.index(control)

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
        own = {OF_TEXT.sub("", name): value for name, value in state.items() if is_of_text(name)}
        extras = self.text.extras(config)
        for name, values in {**self.text.convert(config, own), **extras}.items():
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        finish(writer)

    def _write_tower(self, path: Path, config: Config, state: Mapping[str, Array]) -> None:
        writer = GGUFWriter(path, "clip")
        keys = {"clip.has_vision_encoder": True, **self.tower_keys(config)}
        for key, value in keys.items():
            writer.add_key_value(key, value, value_type(value))
        for name, values in state.items():
            if is_of_text(name):
                continue
            for found, value in self._of_tower(name, values, config).items():
                writer.add_tensor(found, np.ascontiguousarray(value, np.float32))
        for name, value in self.extras(state).items():
            writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
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


OF_TEXT = re.compile(r"(language|text)_model\.")
"""Part of the names of a text model's parameters."""


def is_of_text(name: str) -> bool:
    return bool(OF_TEXT.search(name)) or name.startswith("lm_head")


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


def tower_sizes(
    config: Config, image_mean: Sequence[float] = HALF, image_std: Sequence[float] = HALF
) -> dict[str, Any]:
    """Return the keys that all towers have."""
    c = config.vision_config
    return {
        "clip.vision.patch_size": c.patch_size,
        "clip.vision.embedding_length": c.hidden_size,
        "clip.vision.feed_forward_length": c.intermediate_size,
        "clip.vision.block_count": getattr(c, "depth", None) or c.num_hidden_layers,
        "clip.vision.attention.head_count": getattr(c, "num_heads", None) or c.num_attention_heads,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": list(image_mean),
        "clip.vision.image_std": list(image_std),
        "clip.vision.projection_dim": config.get_text_config().hidden_size,
        "clip.use_gelu": True,
    }


TEXT = SIZES | {
    "vocab_size": N_VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Configuration of the text models whose family has no other."""

LLAMA = {**DENSE, **NEIGHBOURS}
"""Names of Llama's tensors."""


def llama_text(c: Config) -> dict[str, Any]:
    return {**sizes(c), **rope_base(c), **rope_size(c)}


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Chat template of models without one that matters here."""
