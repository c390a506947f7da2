"""Well-formed files of models that contradict themselves: a sentence, and never anything else."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import EngineError, SamplingParams, inspect_model, load_model
from engine.errors import ModelFileError, OutOfDeviceMemory, UnsupportedQuant
from tests.helpers.answers import ids_of
from tests.helpers.golden import golden_path
from tests.helpers.model_draft import DraftTensor, ModelDraft
from tests.helpers.tiny_gguf import tiny_gguf

NAN, INF = float("nan"), float("inf")
Q8_K = 15
IDS = [5, 6, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def sound(folder: Path) -> ModelDraft:
    """A llama of two blocks, with a vocabulary of as many tokens as it has rows."""
    return ModelDraft.read(tiny_gguf(folder / "sound.gguf"))


@pytest.fixture(scope="module")
def routed(sound: ModelDraft) -> ModelDraft:
    """The same with four experts, of which two are used, in place of each FFN."""
    draft, rng = sound.copy(), np.random.default_rng(0)
    draft.meta |= {"llama.expert_count": 4, "llama.expert_used_count": 2}
    for layer in range(2):
        for name, shape in (
            ("ffn_gate_inp", (4, 64)),
            ("ffn_gate_exps", (4, 96, 64)),
            ("ffn_up_exps", (4, 96, 64)),
            ("ffn_down_exps", (4, 64, 96)),
        ):
            values = rng.standard_normal(shape).astype(np.float32) / 8
            draft.tensors[f"blk.{layer}.{name}.weight"] = DraftTensor.of(values)
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            del draft.tensors[f"blk.{layer}.{name}.weight"]
    return draft


@pytest.fixture
def path(folder: Path) -> Iterator[Path]:
    path = folder / "hostile.gguf"
    yield path
    path.unlink(missing_ok=True)


def changed(draft: ModelDraft, meta: dict[str, Any]) -> ModelDraft:
    """A copy with other keys of its architecture; None drops one."""
    return draft.changed(meta, "llama.")


def refusal(draft: ModelDraft, path: Path, **options: Any) -> str:
    """What a person is told when this is loaded; it is told fast, and of one kind of file."""
    draft.write(path)
    inspect_model(path)  # a file that cannot be run can still be looked at
    start = time.monotonic()
    with pytest.raises(ModelFileError) as caught:
        load_model(path, ["cpu", "cpu"], [3, 1], **options).close()
    assert time.monotonic() - start < 5
    sentence = str(caught.value)
    assert path.name in sentence
    assert "\n" not in sentence
    return sentence


def answers(draft: ModelDraft, path: Path) -> list[int]:
    """Token ids that the model continues with."""
    draft.write(path)
    with load_model(path, ["cpu", "cpu"], [3, 1]) as model:
        return ids_of(model.generate(IDS, SamplingParams(max_tokens=3, temperature=0)))


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
    ({"feed_forward_length": [96, 64]}, "blk.1.ffn_gate.weight has shape"),
    ({"feed_forward_length": 95}, "blk.0.ffn_gate.weight has shape"),
    ({"block_count": 3}, "blk.2.attn_norm.weight is missing"),
    ({"block_count": 4096}, "blk.2.attn_norm.weight is missing"),
    ({"block_count": 1}, "'llama.block_count' is 1, but it has more blocks"),
    ({"block_count": None}, "lacks 'llama.block_count'"),
    ({"embedding_length": 32}, "token_embd.weight has shape (301, 64) instead of (301, 32)"),
    ({"attention.key_length": 15}, "rotates 16 of the 15 elements"),
    ({"attention.key_length": 32}, "blk.0.attn_q.weight has shape"),
    ({"attention.value_length": 8}, "blk.0.attn_v.weight has shape"),
    ({"rope.dimension_count": 15}, "rotates 15 of the 16 elements"),
    ({"rope.dimension_count": 18}, "rotates 18 of the 16 elements"),
    ({"rope.scaling.type": "stretchy"}, "scales positions by 'stretchy'"),
    (
        {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 0},
        "not from which context",
    ),
    ({"rope.scaling.type": "yarn", "context_length": 0}, "not from which context"),
    ({"expert_count": 4, "expert_used_count": 2}, "no block has any of its 4 experts"),
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
        ({"expert_gating_func": 9}, "weighs experts in an unknown way (9)"),
        ({"expert_group_count": 3}, "cannot be chosen from"),
        (
            {"expert_group_count": 2, "expert_group_used_count": 0, "expert_used_count": 3},
            "3 of 4 experts cannot be chosen from 1 of 2 groups",
        ),
        ({"expert_count": 0}, "blk.0.ffn_gate.weight is missing"),
    ],
    ids=str,
)
def test_experts_that_do_not_fit_their_tensors_are_refused(
    routed: ModelDraft, path: Path, meta: dict[str, Any], problem: str
) -> None:
    assert problem in refusal(changed(routed, meta), path)


def values(*shape: int) -> DraftTensor:
    rng = np.random.default_rng(1)
    return DraftTensor.of(rng.standard_normal(shape).astype(np.float32))


MISSHAPEN = [
    ("token_embd.weight", values(1, 64)),
    ("token_embd.weight", values(64, 301)),
    ("token_embd.weight", values(301)),
    ("token_embd.weight", values(301 * 64)),
    ("token_embd.weight", values(301, 64, 1)),
    ("token_embd.weight", values(1, 301, 64)),
    ("token_embd.weight", values(306, 64)),
    ("token_embd.weight", values(296, 64)),
    ("output.weight", values(306, 64)),
    ("output.weight", values(296, 64)),
    ("output.weight", values(64, 301)),
    ("output.weight", values(301)),
    ("output_norm.weight", values(64, 1)),
    ("blk.1.attn_norm.weight", values(63)),
    ("blk.0.attn_output.weight", values(32, 64)),
    ("blk.0.attn_q.bias", values(32)),
    ("blk.0.attn_q.scale", values(2)),
    ("rope_freqs.weight", values(7)),
    ("blk.0.attn_qkv.weight", values(127, 64)),
    ("blk.0.attn_qkv.weight", values(128, 64, 1)),
]


@pytest.mark.parametrize(
    ("name", "tensor"), MISSHAPEN, ids=[f"{name}-{t.shape}" for name, t in MISSHAPEN]
)
def test_a_misshapen_tensor_is_refused(
    sound: ModelDraft, path: Path, name: str, tensor: DraftTensor
) -> None:
    draft = sound.copy()
    draft.tensors[name] = tensor
    sentence = refusal(draft, path)
    assert "shape" in sentence or "token_embd.weight" in sentence


def test_every_missing_tensor_but_the_output_head_is_named(sound: ModelDraft, path: Path) -> None:
    for name in sound.tensors:
        draft = sound.copy()
        del draft.tensors[name]
        if name == "output.weight":
            assert len(answers(draft, path)) == 3  # the embedding serves as the head
        else:
            assert name in refusal(draft, path)


def vocabulary(draft: ModelDraft, n: int) -> ModelDraft:
    draft = draft.copy()
    tokens = draft.meta["tokenizer.ggml.tokens"]
    tokens = (tokens + [f"<more {i}>" for i in range(n)])[:n]
    draft.meta |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * n,
        "tokenizer.ggml.token_type": [1] * n,
    }
    return draft


def test_more_tokens_than_rows_are_refused(sound: ModelDraft, path: Path) -> None:
    """Text could turn into tokens that the model does not have."""
    sentence = refusal(vocabulary(sound, 302), path)
    assert "302 tokens but token_embd.weight 301 rows" in sentence


@pytest.mark.parametrize("n", [2, 290, 300])
def test_rows_without_a_token_are_padding(sound: ModelDraft, path: Path, n: int) -> None:
    assert len(answers(vocabulary(sound, n), path)) == 3


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("name", ["output.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight"])
def test_weights_that_are_no_numbers_end_in_a_sentence(
    sound: ModelDraft, path: Path, name: str, value: float
) -> None:
    draft = sound.copy()
    shape = draft.tensors[name].shape
    draft.tensors[name] = DraftTensor.of(np.full(shape, value, np.float32))
    with pytest.raises(EngineError, match="no usable probabilities"):
        answers(draft, path)


@pytest.mark.parametrize("value", [0.0, NAN])
def test_broken_rope_factors_end_in_a_sentence(sound: ModelDraft, path: Path, value: float) -> None:
    draft = sound.copy()
    draft.tensors["rope_freqs.weight"] = DraftTensor.of(np.full(8, value, np.float32))
    with pytest.raises(EngineError, match="no usable probabilities"):
        answers(draft, path)


def test_integer_weights_are_numbers_like_others(sound: ModelDraft, path: Path) -> None:
    """GGUF has integer tensors, so a model may be stored in them."""
    draft, same = sound.copy(), sound.copy()
    ones = np.ones((64,), np.float32)
    draft.tensors["blk.0.attn_norm.weight"] = DraftTensor.of(ones.astype(np.int32))
    same.tensors["blk.0.attn_norm.weight"] = DraftTensor.of(ones)
    assert answers(draft, path) == answers(same, path)


def test_a_type_that_cannot_be_read_is_named(folder: Path, path: Path) -> None:
    draft = ModelDraft.read(tiny_gguf(folder / "wide.gguf", n_embd=256, tokenizer=False))
    name = "blk.1.ffn_up.weight"
    n_rows = draft.tensors[name].shape[0]
    draft.tensors[name] = DraftTensor((n_rows, 256), Q8_K, bytes(n_rows * 292))
    draft.write(path)
    with pytest.raises(UnsupportedQuant, match=f"stores {name} as Q8_K"):
        load_model(path)


def test_a_fused_bias_that_cannot_be_taken_apart_is_refused(folder: Path, path: Path) -> None:
    """Its parts end inside a block of its type."""
    draft = ModelDraft.read(
        tiny_gguf(folder / "odd.gguf", n_head=2, n_head_kv=1, head_dim=24, tokenizer=False)
    )
    draft.tensors["blk.0.attn_qkv.bias"] = DraftTensor((96,), 8, bytes(3 * 34))
    assert "blk.0.attn_qkv.bias" in refusal(draft, path)


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
            logits.append(model.logits(IDS))
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
        list(model.generate(IDS, SamplingParams(max_tokens=2, temperature=0)))
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
