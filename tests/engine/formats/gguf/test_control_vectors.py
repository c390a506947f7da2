"""Control vectors: the residual stream after a layer is moved, equally on every split."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import EngineError, load_model
from tests.helpers.control_vector import write_control_vector
from tests.helpers.plain_llama import PlainLlama
from tests.helpers.tiny_gguf import tiny_gguf

N_EMBD, N_LAYER = 64, 3
IDS = [5, 9, 11, 20, 7]
SPLITS = [([1], "tensor"), ([3, 1], "tensor"), ([1, 0, 1], "tensor"), ([1, 1], "layer")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("control")


@pytest.fixture(scope="module")
def model_path(folder: Path) -> Path:
    return tiny_gguf(folder / "m.gguf", n_layer=N_LAYER, n_embd=N_EMBD)


def directions(seed: int, layers: range = range(1, N_LAYER)) -> dict[int, Any]:
    rng = np.random.default_rng(seed)
    return {layer: rng.normal(size=N_EMBD).astype(np.float32) for layer in layers}


def logits(path: Path, split: list[int], mode: str, **options: Any) -> Any:
    devices = ["cpu"] * len(split)
    with load_model(path, devices, split, split_mode=mode, kv_type="f32", **options) as model:
        return model.logits(IDS)


def close(a: Any, b: Any) -> bool:
    return bool(np.abs(a - b).max() < 2e-5 * np.abs(b).max())


@pytest.mark.parametrize(("split", "mode"), SPLITS, ids=str)
def test_scaled_directions_are_added_behind_their_layers(
    folder: Path, model_path: Path, split: list[int], mode: str
) -> None:
    first, second = directions(1), directions(2, range(2, N_LAYER))
    paths = [
        (write_control_vector(folder / "a.gguf", first), 0.5),
        (write_control_vector(folder / "b.gguf", second), -2.0),
    ]
    total = {1: 0.5 * first[1], 2: 0.5 * first[2] - 2.0 * second[2]}
    expected = PlainLlama(model_path, directions=total).logits(IDS)
    assert not close(PlainLlama(model_path).logits(IDS), expected)
    assert close(logits(model_path, split, mode, control_vectors=paths), expected)


@pytest.mark.parametrize("layers", [(1, 1), (2, 2), (0, 9)])
def test_only_the_layers_of_a_range_are_steered(
    folder: Path, model_path: Path, layers: tuple[int, int]
) -> None:
    vectors = directions(3)
    path = write_control_vector(folder / "c.gguf", vectors)
    kept = {i: v for i, v in vectors.items() if layers[0] <= i <= layers[1]}
    expected = PlainLlama(model_path, directions=kept).logits(IDS)
    steered = logits(
        model_path, [1, 1], "tensor", control_vectors=[(path, 1.0)], control_layers=layers
    )
    assert close(steered, expected)


def test_f16_directions_are_read(folder: Path, model_path: Path) -> None:
    vectors = {1: directions(4)[1].astype(np.float16)}
    path = write_control_vector(folder / "d.gguf", vectors)
    expected = PlainLlama(model_path, directions={1: vectors[1].astype(np.float32)}).logits(IDS)
    assert close(logits(model_path, [1], "tensor", control_vectors=[(path, 1.0)]), expected)


@pytest.mark.parametrize(
    ("vectors", "arch", "problem"),
    [
        (directions(5), "llama", "not a control vector but a 'llama' file"),
        ({1: np.zeros(32, np.float32)}, "controlvector", "does not fit a model with 3 layers"),
        ({3: np.zeros(N_EMBD, np.float32)}, "controlvector", "does not fit a model with 3 layers"),
        ({1: np.full(N_EMBD, np.nan, np.float32)}, "controlvector", "infinite values or NaN"),
        ({1: np.zeros(N_EMBD, np.float64)}, "controlvector", "does not fit"),
        ({0: np.zeros(N_EMBD, np.float32)}, "controlvector", "contains no directions"),
    ],
)
def test_a_file_that_cannot_steer_this_model_is_refused(
    folder: Path, model_path: Path, vectors: dict[int, Any], arch: str, problem: str
) -> None:
    path = write_control_vector(folder / "bad.gguf", vectors, arch)
    with pytest.raises(EngineError, match=problem):
        load_model(model_path, control_vectors=[(path, 1.0)])


def test_a_missing_file_and_impossible_numbers_are_refused(model_path: Path) -> None:
    with pytest.raises(EngineError, match=r"nowhere\.gguf"):
        load_model(model_path, control_vectors=[("nowhere.gguf", 1.0)])
    with pytest.raises(EngineError, match="finite"):
        load_model(model_path, control_vectors=[("a.gguf", float("nan"))])
    with pytest.raises(EngineError, match="first and a last layer"):
        load_model(model_path, control_layers=(3, 2))
