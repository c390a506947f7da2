"""Mistakes that a model file can have, and checks of the outcome: a sentence, or numbers."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine import EngineError, inspect_model, load_model
from engine.formats.gguf.tensors import TYPES, row_bytes
from tests.helpers.golden import nmse
from tests.helpers.model_draft import DraftTensor, ModelDraft

NAN, INF = float("nan"), float("inf")
IDS = [5, 6, 7, 9]
SECONDS = 5
"""Largest processor time of a test."""

BYTES = 256 << 20
"""Memory limit of a model in bytes: more than any of these models takes, less than a mistake."""

TOLERANCE = 1e-3
"""Largest NMSE between splits: a broken model may be ill-conditioned, but must stay the same."""

NUMBERS = [0, 1, 3, 16, -1, 2**31 - 1, 2**40, 0.5, 1e38, NAN, -INF]
OTHERS = ["x", True, []]


def values_for(value: Any, n_layer: int) -> list[Any]:
    """Return other values for a key that has `value`; None drops the key."""
    lists = [[1] * (n_layer - 1), [2] * (n_layer + 1), [0] * n_layer, [-1] * n_layer]
    near: list[Any] = []
    if isinstance(value, list):
        near = [value[:-1], value[::-1], *value[:1]]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        near = [value + 1, value * 2, [value] * n_layer]
    return [None, *NUMBERS, *OTHERS, *lists, *near]


def shapes_for(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return other shapes that differ in more than axes of one element."""
    n, *rest = shape
    shapes: list[tuple[int, ...]] = [(n + 1, *rest), (n - 1, *rest), (2 * n, *rest)]
    if rest:
        shapes += [shape[::-1], (*shape[:-1], rest[-1] + 1), (math.prod(shape),)]
    else:
        shapes += [(n, 2), (2, n)]
    return [s for s in shapes if 0 not in s and _large(s) != _large(shape)]


def _large(shape: tuple[int, ...]) -> list[int]:
    return [n for n in shape if n > 1]


def random_tensor(shape: tuple[int, ...]) -> DraftTensor:
    return DraftTensor.of(np.random.default_rng(0).standard_normal(shape, np.float32) / 8)


def random_blocks(shape: tuple[int, ...], type_number: int) -> DraftTensor:
    """Return a tensor of random blocks of a type; small bytes make small, comparable floats."""
    n_bytes = math.prod(shape[:-1]) * row_bytes(TYPES[type_number], shape[-1])
    data = np.random.default_rng(0).integers(0, 60, n_bytes, np.uint8)
    return DraftTensor(shape, type_number, data.tobytes())


def without(draft: ModelDraft, name: str) -> ModelDraft:
    other = draft.copy()
    del other.tensors[name]
    return other


def with_tensor(draft: ModelDraft, name: str, tensor: DraftTensor) -> ModelDraft:
    other = draft.copy()
    other.tensors[name] = tensor
    return other


def numeric_keys(draft: ModelDraft) -> Iterator[str]:
    """Yield the keys of the architecture that have numbers or lists of numbers."""
    arch = draft.meta["general.architecture"]
    for key, value in draft.meta.items():
        item = value[0] if isinstance(value, list) and value else value
        if key.startswith((f"{arch}.", "xielu.")) and isinstance(item, int | float):
            yield key


def problem_of(draft: ModelDraft, path: Path) -> str:
    """Return the problem that is found in the header: "" or one sentence that names the file."""
    draft.write(path, hollow=True)
    start = time.process_time()
    problem = inspect_model(path).problem
    assert time.process_time() - start < SECONDS
    assert not problem or (path.name in problem and problem.endswith(".") and "\n" not in problem)
    return problem


def run(draft: ModelDraft, path: Path) -> str:
    """Compute a few tokens on three ranks and on one, and compare the logits.

    Returns:
        The sentence of the error; "" where there are logits.
    """
    draft.write(path)
    start = time.process_time()
    try:
        with load_model(path, ["cpu"] * 3, [3, 1, 2], n_ctx=32, kv_type="f32") as model:
            assert model.plan.total_bytes < BYTES
            cut = model.logits(IDS)
        with load_model(path, n_ctx=32, kv_type="f32") as model:
            whole = model.logits(IDS)
    except EngineError as error:
        return str(error)
    assert time.process_time() - start < 2 * SECONDS
    if np.isfinite(whole).all() and whole.any():
        assert nmse(cut, whole) <= TOLERANCE
    return ""
