"""RoPE as a load sets it: the numbers of a file that says the same, which other tests prove."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import EngineError, LoadParams, SamplingParams, SplitError, StateFileError, load_model
from tests.helpers.tiny_gguf import tiny_gguf

IDS = [*range(5, 60)]
SAID = "llama.rope.scaling."
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rope_base": 5e5}, {"llama.rope.freq_base": 5e5}),
    ({"rope_factor": 4.0}, {SAID + "type": "linear", SAID + "factor": 4.0}),
    ({"rope_scaling": "linear", "rope_factor": 2.5},
     {SAID + "type": "linear", SAID + "factor": 2.5}),
    ({"rope_scaling": "yarn", "rope_factor": 4.0}, {SAID + "type": "yarn", SAID + "factor": 4.0}),
    ({"rope_scaling": "yarn", "rope_factor": 8.0, "rope_base": 2e4},
     {SAID + "type": "yarn", SAID + "factor": 8.0, "llama.rope.freq_base": 2e4}),
]  # fmt: skip


def logits(path: Path, n_rank: int = 1, **settings: Any) -> np.ndarray:
    devices = ["cpu"] * n_rank
    with load_model(path, devices, n_ctx=64, kv_type="f32", **settings) as model:
        return model.logits(IDS)


@pytest.mark.parametrize(("settings", "said"), CASES, ids=str)
@pytest.mark.parametrize("n_rank", [1, 2])
def test_a_setting_counts_as_if_the_file_said_it(
    tmp_path: Path, settings: dict[str, Any], said: dict[str, Any], n_rank: int
) -> None:
    plain = tiny_gguf(tmp_path / "plain.gguf")
    wanted = logits(tiny_gguf(tmp_path / "said.gguf", extra=said))
    found = logits(plain, n_rank, **settings)
    assert np.abs(found - wanted).max() <= (0 if n_rank == 1 else 1e-4)
    assert np.abs(found - logits(plain)).max() > 1e-3, "it makes a difference"


def test_what_the_file_says_can_be_undone(tmp_path: Path) -> None:
    said = {SAID + "type": "yarn", SAID + "factor": 4.0}
    stretched = tiny_gguf(tmp_path / "said.gguf", extra=said)
    plain = logits(tiny_gguf(tmp_path / "plain.gguf"))
    assert np.array_equal(logits(stretched, rope_scaling="none"), plain)
    linear = tiny_gguf(tmp_path / "linear.gguf", extra=said | {SAID + "type": "linear"})
    assert np.array_equal(logits(stretched, rope_scaling="linear"), logits(linear))


def test_a_split_keeps_it_and_a_state_fits_nothing_else(tmp_path: Path) -> None:
    path, state = tiny_gguf(tmp_path / "m.gguf"), tmp_path / "chat.state"
    with load_model(path, n_ctx=64, rope_factor=2.0) as model:
        list(model.generate(IDS[:9], SamplingParams(temperature=0, max_tokens=3)))
        with pytest.raises(SplitError, match="'rope_factor' cannot be changed"):
            model.split_as(LoadParams(str(path), ("cpu", "cpu"), n_ctx=64, rope_factor=3.0))
        model.resplit([1, 1], devices=["cpu", "cpu"])
        assert model.params.rope_factor == 2.0
        model.save_state(state)
    with load_model(path, n_ctx=64, rope_factor=2.0) as model:
        assert model.load_state(state).ids
    with (
        load_model(path, n_ctx=64) as model,
        pytest.raises(StateFileError, match="different context length or RoPE settings"),
    ):
        model.load_state(state)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rope_scaling": "longrope"}, {"rope_factor": 0.5}, {"rope_factor": float("nan")},
        {"rope_base": -1.0}, {"rope_base": True}, {"rope_factor": "2"},
    ],
    ids=str,
)  # fmt: skip
def test_what_makes_no_sense_is_a_sentence(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(EngineError, match=f"The setting '{name}' must be"):
        LoadParams("m.gguf", **wrong)
