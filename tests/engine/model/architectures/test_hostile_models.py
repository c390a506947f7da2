"""Well-formed files of models that contradict themselves: each gives a sentence, nothing else."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import EngineError, SamplingParams, load_model
from engine.errors import OutOfDeviceMemory
from tests.helpers.golden import golden_path
from tests.helpers.model_draft import ModelDraft
from tests.helpers.refusals import PROMPT, answers, refusal

NAN, INF = float("nan"), float("inf")


def changed(draft: ModelDraft, meta: dict[str, Any]) -> ModelDraft:
    """Return a copy with other keys of its architecture; None drops one."""
    return draft.changed(meta, "llama.")


def test_the_sound_models_run(sound: ModelDraft, routed: ModelDraft, path: Path) -> None:
    """What the other tests break works before."""
    assert len(answers(sound, path)) == 3
    assert len(answers(routed, path)) == 3


OUT_OF_BOUNDS = [
    *[("attention.head_count", value) for value in (0, -1, 10**9, 2**63, [4, 0])],
    *[("attention.head_count_kv", value) for value in (0, -2, 10**9, [2, 0])],
    *[("attention.key_length", value) for value in (0, -1, 10**9)],
    *[("attention.value_length", value) for value in (0, -1, 2**40)],
    *[("attention.layer_norm_rms_epsilon", value) for value in (NAN, -1e-5, INF, 1e30)],
    *[("block_count", value) for value in (0, -1, 10**9, 2**63)],
    *[("context_length", value) for value in (-1, -(2**40), 2**63)],
    *[("embedding_length", value) for value in (0, -64, 10**9)],
    *[("feed_forward_length", value) for value in (0, -1, 10**9, [96, -96])],
    *[("expert_count", value) for value in (-1, 10**9)],
    *[("rope.dimension_count", value) for value in (0, -2, 10**9)],
    *[("rope.freq_base", value) for value in (0.0, -1.0, NAN, INF, 0, 1e-30)],
    *[("rope.scaling.factor", value) for value in (NAN, -1.0, INF)],
    *[("rope.scaling.attn_factor", value) for value in (NAN, INF, -1.0)],
    *[("rope.scaling.original_context_length", value) for value in (-1, 2**63)],
]


@pytest.mark.parametrize(("key", "value"), OUT_OF_BOUNDS, ids=str)
def test_a_value_out_of_bounds_is_named(
    sound: ModelDraft, path: Path, key: str, value: Any
) -> None:
    assert f": 'llama.{key}' is " in refusal(changed(sound, {key: value}), path)


WRONG_TYPES = ["4", 4.5, True, ["a", "b"], []]


READ_BY_LLAMA = [
    "block_count", "nextn_predict_layers", "context_length", "embedding_length",
    "feed_forward_length", "expert_count", "expert_used_count", "expert_feed_forward_length",
    "expert_group_count", "expert_group_used_count", "expert_gating_func", "expert_weights_scale",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.factor", "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
]  # fmt: skip


@pytest.mark.parametrize("key", READ_BY_LLAMA)
def test_a_value_of_another_type_is_named(routed: ModelDraft, path: Path, key: str) -> None:
    for value in WRONG_TYPES:
        draft = changed(routed, {"rope.scaling.factor": 2.0, key: value})
        if isinstance(value, float) and any(part in key for part in ("rope", "epsilon", "scale")):
            continue  # a number belongs there
        assert f"llama.{key}" in refusal(draft, path)


CONTRADICTIONS = [
    ({"attention.head_count": 3}, "3 query heads cannot share 2"),
    ({"attention.head_count_kv": 3}, "4 query heads cannot share 3"),
    ({"attention.head_count_kv": 8}, "4 query heads cannot share 8"),
    ({"attention.head_count": 8}, "blk.0.attn_q.weight has shape (64, 64) instead of (128, 64)"),
    ({"attention.head_count_kv": None}, "blk.0.attn_k.weight has shape"),
    ({"attention.head_count": [4]}, "has 1 entries for 2 layers"),
    ({"attention.head_count": [4, 2]}, "blk.1.attn_q.weight has shape"),
    ({"attention.head_count_kv": [2]}, "has 1 entries for 2 layers"),
    ({"feed_forward_length": [96]}, "has 1 entries for 2 layers"),
    ({"feed_forward_length": [96, 64]}, "blk.1.ffn_up.weight has shape"),
    ({"feed_forward_length": 95}, "blk.0.ffn_up.weight has shape"),
    ({"block_count": 3}, "blk.2.attn_norm.weight is missing"),
    ({"block_count": 1024}, "blk.2.attn_norm.weight is missing"),
    ({"block_count": 1}, "'llama.block_count' is 1, but the file has more blocks"),
    ({"block_count": None}, "lacks 'llama.block_count'"),
    ({"embedding_length": 32}, "token_embd.weight has shape (301, 64) instead of (301, 32)"),
    ({"attention.key_length": 15}, "rotates 16 of 15 elements"),
    ({"attention.key_length": 32}, "blk.0.attn_q.weight has shape"),
    ({"attention.value_length": 8}, "blk.0.attn_v.weight has shape"),
    ({"rope.dimension_count": 15}, "rotates 15 of 16 elements"),
    ({"rope.dimension_count": 18}, "rotates 18 of 16 elements"),
    ({"rope.scaling.type": "stretchy"}, "uses 'stretchy' position scaling"),
    (
        {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 0},
        "original context length is missing",
    ),
    ({"rope.scaling.type": "yarn", "context_length": 0}, "original context length is missing"),
    ({"expert_count": 4, "expert_used_count": 2}, "it should have 4 experts, but no block has any"),
]


@pytest.mark.parametrize(("meta", "problem"), CONTRADICTIONS, ids=str)
def test_values_that_contradict_each_other_are_refused(
    sound: ModelDraft, path: Path, meta: dict[str, Any], problem: str
) -> None:
    assert problem in refusal(changed(sound, meta), path)


@pytest.mark.parametrize(
    ("meta", "problem"),
    [
        ({"expert_count": 3}, "blk.0.ffn_gate_inp.weight has shape (4, 64) instead of (3, 64)"),
        ({"expert_feed_forward_length": 64}, "blk.0.ffn_gate_exps.weight has shape"),
        ({"expert_feed_forward_length": 0}, "experts have no columns"),
        ({"expert_feed_forward_length": -5}, "expert_feed_forward_length"),
        ({"expert_used_count": -1}, "expert_used_count"),
        ({"expert_used_count": 0}, "uses 0 of 4 experts"),
        ({"expert_used_count": 5}, "uses 5 of 4 experts"),
        ({"expert_used_count": None}, "uses 0 of 4 experts"),
        ({"expert_gating_func": 9}, "its expert gating (9) is unknown"),
        ({"expert_group_count": 3}, "cannot be chosen from"),
        (
            {"expert_group_count": 2, "expert_group_used_count": 0, "expert_used_count": 3},
            "3 of 4 experts cannot be chosen from 1 of 2 groups",
        ),
        ({"expert_count": 0}, "blk.0.ffn_up.weight is missing"),
    ],
    ids=str,
)
def test_experts_that_do_not_fit_their_tensors_are_refused(
    routed: ModelDraft, path: Path, meta: dict[str, Any], problem: str
) -> None:
    assert problem in refusal(changed(routed, meta), path)


@pytest.mark.parametrize("key", ["attention.head_count", "rope.freq_base", "context_length"])
def test_a_list_longer_than_any_model_is_refused_before_it_is_read(
    sound: ModelDraft, path: Path, key: str
) -> None:
    """Bounds were checked item by item: 16 million of one byte each took a second for each key."""
    sentence = refusal(changed(sound, {key: [4] * 5000}), path)
    assert f"'llama.{key}' in its metadata has 5000 entries, more than any model" in sentence


@pytest.mark.parametrize("n_ctx", [2**31, 2**40, 2**62])
def test_a_context_that_does_not_fit_is_refused_before_it_is_allocated(
    sound: ModelDraft, path: Path, n_ctx: int
) -> None:
    sound.write(path)
    start = time.monotonic()
    with pytest.raises(OutOfDeviceMemory, match="needed to load the model"):
        load_model(path, ["cpu", "cpu"], n_ctx=n_ctx)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("trained", [0, None, 2**31])
def test_an_odd_trained_context_gives_the_usual_one(
    sound: ModelDraft, path: Path, trained: int | None
) -> None:
    changed(sound, {"context_length": trained}).write(path)
    with load_model(path) as model:
        assert model.n_ctx == 2048


def test_a_factor_without_a_type_scales_linearly(sound: ModelDraft, path: Path) -> None:
    """Files from before there were types have only the factor, under an older name still."""
    scalings: list[dict[str, Any]] = [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        {},
    ]
    logits = []
    for scaling in scalings:
        changed(sound, scaling).write(path)
        with load_model(path) as model:
            logits.append(model.logits(PROMPT))
    linear, *same, none, unscaled = logits
    assert all(np.array_equal(linear, other) for other in same)
    assert np.array_equal(none, unscaled)
    assert not np.array_equal(linear, unscaled)


VALUES = st.one_of(
    st.sampled_from(
        [0, 1, 2, 3, -1, 4, 8, 16, 32, 64, 96, 128, 301, 2**31, 2**32, 2**63, -(2**63)]
    ),
    st.sampled_from([0.0, -1.0, 1e-45, 1e-5, 1.5, 2.0, 1e38, NAN, INF, -INF]),
    st.sampled_from(["", "linear", "yarn", "none", "llama", "qwen3", "bitnet", "gpt2", "\x00"]),
    st.lists(st.sampled_from([0, 1, 2, 4, 64, 96, -1]), max_size=3),
    st.booleans(),
    st.none(),
)
MORE_KEYS = (
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor",
    "rope.scaling.original_context_length", "rope.scale_linear",
    "expert_count", "expert_used_count", "expert_feed_forward_length",
)  # fmt: skip


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_whatever_the_metadata_says_it_works_or_is_refused(
    sound: ModelDraft, routed: ModelDraft, path: Path, data: st.DataObject
) -> None:
    draft = data.draw(st.sampled_from([sound, routed]))
    keys = sorted(draft.meta) + [f"llama.{key}" for key in MORE_KEYS]
    edits = data.draw(st.dictionaries(st.sampled_from(keys), VALUES, min_size=1, max_size=3))
    draft.changed(edits).write(path)
    start = time.monotonic()
    with suppress(EngineError), load_model(path, ["cpu", "cpu"], [3, 1]) as model:
        list(model.generate(PROMPT, SamplingParams(max_tokens=2, temperature=0)))
    assert time.monotonic() - start < 5


def test_every_malformed_reference_file_is_refused() -> None:
    """Collections of broken files from other readers' fuzzers."""
    files = [path for path in golden_path("malformed").rglob("*") if path.is_file()]
    assert files
    for file in files:
        start = time.monotonic()
        with pytest.raises(EngineError):
            load_model(file).close()
        assert time.monotonic() - start < 5, file


def test_a_block_that_is_falsely_counted_as_an_mtp_block_is_named(
    sound: ModelDraft, path: Path
) -> None:
    problem = refusal(changed(sound, {"nextn_predict_layers": 1}), path)
    assert "it has the tensor 'blk." in problem
