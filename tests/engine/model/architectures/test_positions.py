"""Positions of models: learned tables, two sets of RoPE, windows, ALiBi."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LoadParams, Planner, inspect_model, load_model
from engine.errors import ContextOverflow, InvalidGGUF
from engine.model.layers.mixers.attention import alibi_slopes
from tests.helpers.golden import TOLERANCE, Case, golden_error, golden_path
from tests.helpers.model_draft import DraftTensor, ModelDraft

TWO_RANKS = Case((1, 1))


def draft_of(name: str, **meta: Any) -> ModelDraft:
    """Return a reference model with other metadata; keys without the architecture."""
    draft = ModelDraft.read(golden_path(f"{name}.gguf"))
    return draft.changed(
        {k.replace("__", "."): v for k, v in meta.items()}, f"{draft.meta['general.architecture']}."
    )


@pytest.mark.parametrize("name", ["gpt2-q4_k_m", "starcoder-q4_k_m"])
def test_learned_positions_limit_the_context(name: str) -> None:
    path = golden_path(f"{name}.gguf")
    plan = Planner(path).plan(LoadParams(str(path), n_ctx=100))
    assert plan.n_ctx == 64
    assert plan.warnings == ("The model has no positions beyond 64, which limits the context.",)
    with load_model(path, ["cpu"], n_ctx=100) as model:
        assert model.n_ctx == 64
        assert len(model.logits([5] * 64)) == 64
        with pytest.raises(ContextOverflow):
            model.logits([5] * 65)


@pytest.mark.parametrize("n_ctx", [None, 64, 48])
def test_a_context_within_learned_positions_is_as_asked(n_ctx: int | None) -> None:
    path = golden_path("gpt2-q4_k_m.gguf")
    plan = Planner(path).plan(LoadParams(str(path), n_ctx=n_ctx))
    assert plan.n_ctx == (n_ctx or 64)
    assert plan.warnings == ()


@pytest.mark.parametrize("n_positions", [None, 0, 63])
def test_a_table_of_positions_must_be_as_long_as_said(
    tmp_path: Path, n_positions: int | None
) -> None:
    path = draft_of("gpt2-q4_k_m", context_length=n_positions).write(tmp_path / "m.gguf")
    inspect_model(path)
    with pytest.raises(InvalidGGUF, match="position"):
        load_model(path, ["cpu"]).close()


def with_divisors(long: float, short: float, n_pairs: int = 32) -> ModelDraft:
    """Return Phi 3 with an original context of 128 tokens."""
    draft = draft_of("phi3-q4_k_m", rope__scaling__original_context_length=128)
    for kind, value in (("long", long), ("short", short)):
        values = np.full(n_pairs, value, np.float32)
        draft.tensors[f"rope_factors_{kind}.weight"] = DraftTensor.of(values)
    return draft


@pytest.mark.parametrize(("n_ctx", "is_long"), [(96, False), (128, False), (129, True)])
def test_the_context_decides_which_rotations_are_used(
    tmp_path: Path, n_ctx: int, *, is_long: bool
) -> None:
    """Divisors of 1 change nothing."""
    path = with_divisors(long=1, short=3).write(tmp_path / "m.gguf")
    assert (golden_error("phi3-q4_k_m", TWO_RANKS, path, n_ctx=n_ctx) <= TOLERANCE) == is_long
    path = with_divisors(long=3, short=1).write(tmp_path / "m.gguf")
    assert (golden_error("phi3-q4_k_m", TWO_RANKS, path, n_ctx=n_ctx) <= TOLERANCE) == (not is_long)


def test_divisors_must_be_as_many_as_rotated_pairs(tmp_path: Path) -> None:
    path = with_divisors(1, 1, n_pairs=31).write(tmp_path / "m.gguf")
    with pytest.raises(InvalidGGUF, match=r"\(31,\) instead of \(32,\)"):
        load_model(path, ["cpu"]).close()


@pytest.mark.parametrize("name", ["cohere2-q4_k_m", "cohere2moe-q4_k_m"])
@pytest.mark.parametrize("window", [None, 0])
def test_windows_without_a_length_are_refused(
    tmp_path: Path, name: str, window: int | None
) -> None:
    path = draft_of(name, attention__sliding_window=window).write(tmp_path / "m.gguf")
    inspect_model(path)
    with pytest.raises(InvalidGGUF, match="its sliding-window length is missing"):
        load_model(path, ["cpu"]).close()


def test_cohere_s_experts_have_the_norm_whose_epsilon_the_file_has(tmp_path: Path) -> None:
    name = "cohere2moe-q4_k_m"
    draft = draft_of(name, attention__layer_norm_rms_epsilon=None)
    path = draft.write(tmp_path / "m.gguf")
    assert golden_error(name, TWO_RANKS, path) > TOLERANCE  # the reference model has RMSNorms


def test_mpt_without_alibi_is_refused(tmp_path: Path) -> None:
    draft = ModelDraft.read(golden_path("bloom-q4_k_m.gguf"))
    draft.meta = {key.replace("bloom.", "mpt."): value for key, value in draft.meta.items()}
    keys = {"general.architecture": "mpt", "mpt.attention.max_alibi_bias": 0.0}
    path = draft.changed(keys).write(tmp_path / "m.gguf")
    with pytest.raises(InvalidGGUF, match="without ALiBi"):
        load_model(path, ["cpu"]).close()


def test_slopes_of_alibi_halve_from_head_to_head() -> None:
    assert alibi_slopes(8, 8.0) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(4, 8.0) == [2.0**-i for i in (2, 4, 6, 8)]


def test_further_heads_have_the_slopes_between() -> None:
    """As the code of the paper: those of twice the heads, every other one."""
    between = alibi_slopes(16, 8.0)[0::2]
    assert alibi_slopes(11, 8.0) == alibi_slopes(8, 8.0) + between[:3]
