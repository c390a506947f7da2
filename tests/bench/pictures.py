"""Time to the first token of conversations with two pictures, in each of their turns.

    python -m tests.bench.pictures smolvlm-256m FOLDER [--rounds 3] [--size 1024x768]

The model is one of `SHAPES`: the sizes of a published one with random weights, the text in Q8_0
and the tower in F16, written to FOLDER unless it is there. Each round asks about two pictures of
one size; then the next question of the same conversation: as it is, behind a change of the split,
from a state file in a model loaded anew, and without one. All second answers must have the tokens
of a model that has computed nothing before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from transformers import Idefics3Config, Qwen3VLConfig

from engine import AnswerRequest, ChatMessage, Model, SamplingParams, TokenText, load_model
from tests.bench.family_shapes import add_quantised
from tests.helpers.hf_models.seeing import SEEING, SeeingFamily
from tests.helpers.hf_models.seeing.family import N_VOCAB
from tests.helpers.model_draft import ModelDraft
from tests.helpers.pictures import random_picture, shown
from tests.helpers.tiny_gguf import finish, value_type

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

IDS = {
    "image_token_id": N_VOCAB - 3, "vision_start_token_id": N_VOCAB - 5,
    "vision_end_token_id": N_VOCAB - 4, "video_token_id": N_VOCAB - 6,
}  # fmt: skip
"""Ids of Qwen's control tokens in the small vocabulary."""


def smolvlm_256m() -> Any:
    """Return the sizes of SmolVLM 256M: SmolLM2 135M, and tiles of 512 x 512 of 64 tokens each."""
    return Idefics3Config(
        text_config={
            "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
            "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
            "head_dim": 64, "vocab_size": N_VOCAB, "max_position_embeddings": 8192,
            "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
        },
        vision_config={
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "image_size": 512, "patch_size": 16,
        },
        image_token_id=0, scale_factor=4, tie_word_embeddings=True,
    )  # fmt: skip


def qwen3vl_2b_quarter() -> Any:
    """Return the sizes of Qwen 3-VL 2B with a quarter of the layers of its text and its tower."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
    return Qwen3VLConfig(
        text_config={
            "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 7,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": N_VOCAB, "max_position_embeddings": 8192, "rope_parameters": rope,
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 6, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096,
            "patch_size": 16, "spatial_merge_size": 2, "out_hidden_size": 2048,
            "num_position_embeddings": 2304, "deepstack_visual_indexes": [1, 3, 5],
        },
        tie_word_embeddings=True, **IDS,
    )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Sizes of a published model that sees.

    Attributes:
        family: name of its family in `SEEING`.
        keys: keys of the mmproj file that differ from those of the small model.
    """

    family: str
    config: Any
    keys: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Write `model.gguf` and `mmproj.gguf`."""
        small = next(family for family in SEEING if family.name == self.family)
        keys = self.keys
        large: SeeingFamily = replace(
            small, config=self.config, tower_keys=lambda c: {**small.tower_keys(c), **keys}
        )
        with tempfile.TemporaryDirectory(dir=folder) as plain:
            large.build(Path(plain))
            for name in ("model.gguf", "mmproj.gguf"):
                rewrite(Path(plain) / name, folder / name, is_text=name == "model.gguf")


SHAPES = {
    "smolvlm-256m": Shape("idefics3", smolvlm_256m, {"clip.vision.preproc_image_size": 2048}),
    "qwen3vl-2b-quarter": Shape(
        "qwen3vl", qwen3vl_2b_quarter,
        {
            "clip.vision.image_size": 768, "clip.vision.image_min_pixels": 65536,
            "clip.vision.image_max_pixels": 1 << 20,
        },
    ),
}  # fmt: skip


def rewrite(source: Path, goal: Path, *, is_text: bool) -> None:
    """Write a file of F32 again: the matrices of a text model in Q8_0, those of a tower in F16."""
    reader, draft = GGUFReader(source), ModelDraft.read(source).meta
    writer = GGUFWriter(goal, draft.pop("general.architecture"))
    for key, value in draft.items():
        writer.add_key_value(key, value, value_type(value))
    for tensor in reader.tensors:
        values = tensor.data.reshape(tuple(int(n) for n in reversed(tensor.shape)))
        if is_text:
            add_quantised(writer, tensor.name, values)
        elif values.ndim > 1 and "position" not in tensor.name:
            kind = GGMLQuantizationType.F16
            writer.add_tensor(tensor.name, values.astype(np.float16), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.ascontiguousarray(values))
    finish(writer)


def first_token(model: Model, messages: list[ChatMessage]) -> tuple[float, list[int]]:
    """Return the seconds until the first token of an answer, and its tokens."""
    begun, first, found = time.perf_counter(), 0.0, list[int]()
    for event in model.answer(AnswerRequest(messages=tuple(messages), sampling=GREEDY)):
        if isinstance(event, TokenText):
            first = first or time.perf_counter() - begun
            found += event.ids
    return first, found


class Bench:
    """One model's conversations.

    Args:
        size: width and height of the pictures.

    Attributes:
        seconds: times to first tokens by what came before.
    """

    def __init__(self, folder: Path, threads: int, size: tuple[int, int]) -> None:
        pictures = (random_picture(*size, seed=seed) for seed in range(2))
        self._first = [shown("the split model", *pictures)]
        more = ChatMessage("assistant", "hello"), ChatMessage("user", "world")
        self._second = [*self._first, *more]
        self._folder, self._threads = folder, threads
        self.seconds: dict[str, list[float]] = {}

    def opened(self) -> Model:
        """Load the model."""
        eyes = self._folder / "mmproj.gguf"
        return load_model(
            self._folder / "model.gguf", n_ctx=4096, cpu_threads=self._threads, draft="off",
            mmproj=eyes,
        )  # fmt: skip

    def round(self) -> None:
        """Ask in all ways once."""
        state = self._folder / "pictures.state"
        with self.opened() as model:
            wanted = self._note(
                "second question, nothing cached", *first_token(model, self._second)
            )
        with self.opened() as model:
            self._note("first question", *first_token(model, self._first))
            model.save_state(state)
            self._same(wanted, "second question, cached", model)
            model.resplit([1, 1], devices=["cpu", "cpu"])
            self._same([], "again behind a re-split", model)
        with self.opened() as model:
            model.load_state(state)
            self._same(wanted, "second question from a state file", model)
        state.unlink()

    def _same(self, wanted: list[int], name: str, model: Model) -> None:
        found = self._note(name, *first_token(model, self._second))
        if wanted and found != wanted:
            raise SystemExit(f"{name}: {found} in place of {wanted}")

    def _note(self, name: str, seconds: float, ids: list[int]) -> list[int]:
        self.seconds.setdefault(name, []).append(seconds)
        return ids


def size_of(text: str) -> tuple[int, int]:
    """Return the width and height in a text such as "1024x768"."""
    width, height = map(int, text.split("x"))
    return width, height


def main() -> None:
    """Measure one model."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-threads", type=int, default=2)
    parser.add_argument("--size", type=size_of, default=(1024, 768), metavar="WIDTHxHEIGHT")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if not (args.folder / "mmproj.gguf").exists():
        SHAPES[args.shape].write(args.folder)
    bench = Bench(args.folder, args.cpu_threads, args.size)
    for _ in range(args.rounds):
        bench.round()
    first = statistics.median(bench.seconds["first question"])
    for name, seconds in bench.seconds.items():
        middle = statistics.median(seconds)
        sys.stdout.write(f"{name}: {middle:.2f} s, {100 * middle / first:.1f} % of the first\n")


if __name__ == "__main__":
    main()
