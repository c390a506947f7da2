"""Logits against those of `transformers`, on random models of many families.

The files are written here by `tests.helpers.hf_models`, so this needs no reference data.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine import load_model
from engine.model.forward.batch import Batch
from tests.helpers.answers import ask
from tests.helpers.golden import TOLERANCE, golden_path, nmse
from tests.helpers.hf_models import FAMILIES, Family
from tests.helpers.tiers import paired, swept

SPLITS: dict[str, dict[str, Any]] = {
    "1 rank": {"devices": ["cpu"]},
    "2 ranks": {"devices": ["cpu"] * 2},
    "3 ranks": {"devices": ["cpu"] * 3},
    "uneven": {"devices": ["cpu"] * 3, "split": [3, 1, 2]},
    "an empty rank": {"devices": ["cpu"] * 3, "split": [5, 0, 1]},
    "by layers": {"devices": ["cpu"] * 2, "split_mode": "layer"},
    "by groups": {"devices": ["cpu"] * 3, "split_mode": "groups", "groups": [2, 1]},
}
BY_NAME = {family.name: family for family in FAMILIES}
TYPICAL = (
    "llama", "qwen3moe", "gemma3", "gemma4-shared-kv", "gpt-oss", "deepseek2", "qwen3next",
    "qwen35", "kimi-linear", "jamba", "mamba2", "falcon-h1", "lfm2", "bloom", "llama4",
)  # fmt: skip
"""A family for each kind of thing that is remembered."""


@dataclass(frozen=True)
class Built:
    family: Family
    path: Path
    ids: list[int]
    logits: Any


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Return a family's file, written once for all tests of this module that use it."""
    family = BY_NAME[request.param]
    path = tmp_path_factory.mktemp("hf") / f"{family.name}.gguf"
    return Built(family, path, *family.build(path))


@pytest.mark.parametrize(
    ("built", "split"), paired(list(BY_NAME), list(SPLITS)), indirect=["built"]
)
def test_logits_equal_transformers(built: Built, split: str) -> None:
    with load_model(built.path, kv_type="f32", n_ctx=64, **SPLITS[split]) as model:
        assert nmse(model.logits(built.ids), built.logits) <= TOLERANCE
        for memory in model.memory():
            assert memory.measured.weights == memory.predicted.weights
            assert memory.measured.kv == memory.predicted.kv


@pytest.mark.parametrize("built", swept(BY_NAME, TYPICAL), indirect=True)
def test_a_conversation_goes_on_as_if_computed_afresh(built: Built) -> None:
    """What is kept of earlier turns, in caches and recurrent states, changes no token."""
    with load_model(built.path, kv_type="f32", n_ctx=64, **SPLITS["uneven"]) as model:

        def turn(prompt: list[int]) -> tuple[list[int], int]:
            sampled, n_kept = ask(model, prompt, 5)
            return prompt + sampled, n_kept

        first, _ = turn(built.ids[:9])
        second, n_kept = turn(first + built.ids[9:14])
        again, n_kept_again = turn(first + built.ids[9:14])
        other, n_kept_other = turn(built.ids[:7] + built.ids[20:26])
        for whole, n_prompt in ((first, 9), (second, 19), (again, 19), (other, 13)):
            logits = model.logits(whole)
            assert whole[n_prompt:] == logits[n_prompt - 1 : -1].argmax(-1).tolist()
    assert n_kept >= 8
    assert n_kept_again == 18
    assert n_kept_other in (0, 7)


@pytest.mark.parametrize(
    ("built", "split"), paired(list(BY_NAME), ["1 rank", "uneven"]), indirect=["built"]
)
def test_chunks_and_single_tokens_equal_one_pass(built: Built, split: str) -> None:
    """Chunks shorter and longer than a sliding window, then token by token, from a used cache."""
    ids, logits = built.ids, []
    with load_model(built.path, kv_type="f32", n_ctx=64, **SPLITS[split]) as model:
        model.logits(ids[::-1])
        for size in (3, 14, 1, 1, 8) + (1,) * 13:
            n_past = sum(map(len, logits))
            some = ids[n_past : n_past + size]
            batch = Batch.of_one(n_past, len(some), 0)
            logits.append(model.runtime.runner.forward(some, batch))
    assert nmse(np.concatenate(logits), built.logits) <= TOLERANCE


def structure(path: Path) -> tuple[set[tuple[str, int]], set[str]]:
    """Return tensor names without layers, with their numbers of axes, and names of keys.

    A leading axis of one element is not counted: requantising a file drops it.
    """
    reader = gguf.GGUFReader(path)
    tensors = {
        (re.sub(r"^blk\.\d+\.", "blk.N.", t.name), len(np.trim_zeros(t.shape - 1, "b")))
        for t in reader.tensors
    }
    arch = reader.fields["general.architecture"].contents()
    return tensors, {key for key in reader.fields if key.startswith(f"{arch}.")}


@pytest.mark.parametrize("built", [f.name for f in FAMILIES if f.like], indirect=True)
def test_files_look_like_converted_ones(built: Built) -> None:
    """The reference file of the same architecture has the same tensors and keys."""
    assert built.family.like
    assert structure(built.path) == structure(golden_path(built.family.like))
