"""Linear attention by the delta rule: any cut of its heads, conversations, variants of files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import load_model
from engine.errors import ModelFileError
from engine.model.forward.batch import Batch
from tests.helpers.answers import ask
from tests.helpers.golden import TOLERANCE, Case, golden_error, nmse
from tests.helpers.hf_models import FAMILIES
from tests.helpers.model_draft import DraftTensor, ModelDraft
from tests.helpers.mtp_models import PlainMTP
from tests.helpers.tiers import paired, swept

NAMES = ("qwen3next", "qwen35", "qwen35moe", "kimi-linear")
N_KEY, SIZE, DIM = 2, 3, 24
"""Key heads, value heads of each, and elements of a head of the Qwen models."""

OPTIONS: dict[str, Any] = {"kv_type": "f32", "n_ctx": 64}
SPLITS = ([1], [1, 1, 1], [5, 0, 1, 2, 2])


@dataclass(frozen=True)
class Built:
    """A model file, and the logits that `transformers` computes after each of `ids`."""

    arch: str
    path: Path
    ids: list[int]
    logits: Any

    def error(self, path: Path, split: Sequence[float], **options: Any) -> float:
        """Return the NMSE of the file at `path`, which should compute the same as this one."""
        with load_model(path, ["cpu"] * len(split), split, **OPTIONS | options) as model:
            return nmse(model.logits(self.ids), self.logits)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    folder = tmp_path_factory.mktemp("delta")
    paths = [(f, folder / f"{f.name}.gguf") for f in FAMILIES if f.name in NAMES]
    return {f.name: Built(f.arch, path, *f.build(path)) for f, path in paths}


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    split=st.lists(st.integers(0, 5), min_size=2, max_size=8).filter(any),
    mode=st.sampled_from(["tensor", "tensor", "tensor", "layer"]),
    n_batch=st.sampled_from([1, 7, 64]),
)
def test_any_split_equals_transformers(
    models: dict[str, Built], name: str, split: list[int], mode: str, n_batch: int
) -> None:
    """Ranks without heads, with a part of a key head's value heads, and more than there are."""
    built = models[name]
    assert built.error(built.path, split, split_mode=mode, n_batch=n_batch) <= TOLERANCE


@pytest.mark.parametrize("override", ["ssm_", r"blk\.0\.attn_", "attn_output", "shexp", "ffn_"])
@pytest.mark.parametrize("name", ["qwen3next", "qwen35moe", "kimi-linear"])
def test_a_part_on_another_rank_changes_nothing(
    models: dict[str, Built], name: str, override: str
) -> None:
    built = models[name]
    overrides = [(override, "cpu")]
    assert built.error(built.path, [0, 1, 2, 1], overrides=overrides) <= TOLERANCE


@pytest.mark.parametrize(
    "name",
    swept(["qwen3next-q4_k_m", "qwen35-q4_k_m", "kimi-linear-q4_k_m"], ["kimi-linear-q4_k_m"]),
)
def test_packed_weights_equal_llama_cpp(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks than key heads: rows and columns of the value heads are cut inside a group."""
    monkeypatch.setattr("engine.planning.plan.DENSE_FRACTION", 0.0)
    for split in ((1,), (1, 2), (1, 1, 1, 1), (2, 0, 1, 3, 1)):
        assert golden_error(name, Case(split, chunk=9)) <= TOLERANCE


@pytest.mark.parametrize(("name", "split"), paired(NAMES, [[1], [3, 1, 2]]), ids=str)
def test_a_conversation_equals_fresh_runs(
    models: dict[str, Built], name: str, split: list[int]
) -> None:
    """Turns that go on, repeat, change the last question, go far back, and begin anew."""
    built, devices = models[name], ["cpu"] * len(split)
    ids, options = built.ids, OPTIONS | {"n_batch": 8}

    def fresh(prompt: list[int]) -> list[int]:
        with load_model(built.path, devices, split, **options) as model:
            return ask(model, prompt)[0]

    with load_model(built.path, devices, split, **options) as model:
        first, n_kept = ask(model, ids[:11])
        assert (first, n_kept) == (fresh(ids[:11]), 0)
        prompt = ids[:11] + first + ids[11:16]
        second, n_kept = ask(model, prompt)
        assert (second, n_kept) == (fresh(prompt), 11 + len(first) - 1)
        again, n_kept = ask(model, prompt)
        assert (again, n_kept) == (second, len(prompt) - 1)
        changed = [*prompt[:-1], ids[30], ids[31]]
        other, n_kept = ask(model, changed)
        assert (other, n_kept) == (fresh(changed), len(prompt) - 1)
        assert ask(model, ids[:11]) == (first, 10)
        assert ask(model, ids[20:33]) == (fresh(ids[20:33]), 0)


def with_drafting_block(built: Built) -> ModelDraft:
    """Add a block: a copy of the last, which has attention, with what drafting needs."""
    draft = ModelDraft.read(built.path)
    for tensor in [t for t in draft.tensors if t.startswith("blk.2.")]:
        draft.tensors[tensor.replace("blk.2.", "blk.3.")] = draft.tensors[tensor]
    rng = np.random.default_rng(3)
    for part, shape in (("eh_proj", (64, 128)), ("enorm", (64,)), ("hnorm", (64,))):
        values = rng.standard_normal(shape, np.float32) / np.float32(8)
        draft.tensors[f"blk.3.nextn.{part}.weight"] = DraftTensor.of(values)
    draft.tensors["blk.3.nextn.shared_head_head.weight"] = draft.tensors["output.weight"]
    return draft.changed({"block_count": 4, "nextn_predict_layers": 1}, f"{built.arch}.")


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_drafting_blocks_change_nothing(
    models: dict[str, Built], tmp_path: Path, name: str
) -> None:
    """Whether the list of recurrent layers counts them, leaves them out or is not there."""
    built, draft = models[name], with_drafting_block(models[name])
    for key in (
        {"attention.recurrent_layers": [True, True, False, False]},
        {},
        {"attention.recurrent_layers": None, "full_attention_interval": 3},
    ):
        path = draft.changed(key, f"{built.arch}.").write(tmp_path / "m.gguf")
        for split in SPLITS:
            assert built.error(path, split) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "split"), paired(["qwen3next", "qwen35", "qwen35moe"], SPLITS), ids=str
)
def test_drafting_blocks_guess_by_normed_hidden_states(
    models: dict[str, Built], tmp_path: Path, name: str, split: list[int]
) -> None:
    """A chain of guesses, with routed experts and a shared one or without."""
    built = models[name]
    path = with_drafting_block(built).write(tmp_path / "m.gguf")
    hidden, options = list[Any](), OPTIONS | {"draft": "mtp"}
    with load_model(path, ["cpu"] * len(split), split, **options) as model:
        runner = model.runtime.runner
        for at in range(0, 30, 5):
            wanted = Batch.of_one(at, 5, 0)._replace(wants_hidden=True)
            hidden += list(runner.forward(built.ids[at : at + 5], wanted))
        plain, text, before = PlainMTP(path), built.ids[:31], np.array(hidden, np.float64)
        for number in range(3):
            place = Batch.of_one(30 + number, 1, 0)
            logits = runner.draft(text[-1:], place, number)
            expected, own = plain.pairs(text, before)
            assert nmse(logits, expected[-1:]) <= TOLERANCE
            text, before = [*text, int(logits.argmax())], np.concatenate([before, own[-1:]])


def values_of(draft: ModelDraft, name: str) -> Any:
    tensor = draft.tensors.pop(name)
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)


def joint_projections(built: Built) -> ModelDraft:
    """Return Qwen3-Next as converted in 2025: `ssm_in` with rows q, k, v, gate of each key head."""
    draft = ModelDraft.read(built.path)
    for layer in range(2):
        block = f"blk.{layer}."
        qkv, z = (values_of(draft, f"{block}attn_{part}.weight") for part in ("qkv", "gate"))
        q, k, v = np.split(qkv, [N_KEY * DIM, 2 * N_KEY * DIM])
        parts = [part.reshape(N_KEY, -1, 64) for part in (q, k, v, z)]
        rows = np.concatenate(parts, axis=1).reshape(-1, 64)
        draft.tensors[f"{block}ssm_in.weight"] = DraftTensor.of(rows)
    return draft


def fused_attention(built: Built) -> ModelDraft:
    """Return the layer with attention as `convert_hf_to_gguf.py --fuse-qkv` writes it."""
    draft = ModelDraft.read(built.path)
    parts = [values_of(draft, f"blk.2.attn_{part}.weight") for part in "qkv"]
    draft.tensors["blk.2.attn_qkv.weight"] = DraftTensor.of(np.concatenate(parts))
    return draft


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize(
    ("name", "change"),
    [("qwen3next", joint_projections), ("qwen3next", fused_attention), ("qwen35", fused_attention)],
)
def test_other_layouts_of_the_same_weights(
    models: dict[str, Built], tmp_path: Path, name: str, change: Any, split: list[int]
) -> None:
    built = models[name]
    path = change(built).write(tmp_path / "m.gguf")
    assert built.error(path, split, n_batch=9) <= TOLERANCE


CONTRADICTIONS = [
    ("qwen3next", {"ssm.group_count": 0}, "0 key heads and 6 value heads of 24 elements"),
    ("qwen3next", {"ssm.group_count": 4}, "4 key heads and 6 value heads of 24 elements"),
    ("qwen3next", {"ssm.group_count": 1}, "blk.0.attn_qkv.weight has shape"),
    ("qwen3next", {"ssm.group_count": None}, "lacks 'qwen3next.ssm.group_count'"),
    ("qwen35", {"ssm.time_step_rank": 8}, "do not add up to the 144 values"),
    ("qwen35", {"ssm.state_size": 1 << 24}, "do not add up to the 144 values"),
    ("qwen35", {"ssm.inner_size": 100}, "do not add up to the 100 values"),
    ("qwen35", {"ssm.conv_kernel": 3}, "blk.0.ssm_conv1d.weight has shape"),
    (
        "qwen35",
        {"attention.value_length": 16},
        "its gates have 32 elements, but its values have 16",
    ),
    ("qwen35", {"attention.recurrent_layers": [True] * 3}, "blk.2.ssm_norm.weight is missing"),
    ("qwen35", {"attention.recurrent_layers": [True]}, "has 1 entries for 3 layers"),
    ("qwen35moe", {"attention.head_count": 0}, "0 query heads cannot share 2 key-value heads"),
    ("kimi-linear", {"kda.head_dim": 32}, "blk.0.ssm_norm.weight has shape"),
    ("kimi-linear", {"kda.head_dim": None}, "lacks 'kimi-linear.kda.head_dim'"),
    ("kimi-linear", {"attention.head_count": [0, 4, 4]}, "block 0 has no heads"),
    ("kimi-linear", {"ssm.conv_kernel": 5}, "blk.0.ssm_conv1d_q.weight has shape"),
    ("kimi-linear", {"rope.dimension_count": 40}, "its RoPE rotates 40 of 40 elements"),
    ("kimi-linear", {"attention.head_count_kv": 1}, "blk.0.attn_q.weight has shape"),
]


@pytest.mark.parametrize(("name", "meta", "problem"), CONTRADICTIONS, ids=str)
def test_sizes_that_contradict_each_other_are_refused(
    models: dict[str, Built], tmp_path: Path, name: str, meta: dict[str, Any], problem: str
) -> None:
    draft = ModelDraft.read(models[name].path).changed(meta, f"{models[name].arch}.")
    with pytest.raises(ModelFileError) as caught:
        load_model(draft.write(tmp_path / "m.gguf"), ["cpu"] * 2)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen3next", "blk.0.ssm_ba.weight"),
        ("qwen35", "blk.1.ssm_dt.bias"),
        ("qwen35", "blk.1.post_attention_norm.weight"),
        ("kimi-linear", "blk.0.ssm_a"),
        ("kimi-linear", "blk.1.ssm_g_a.weight"),
    ],
)
def test_a_missing_tensor_is_named(
    models: dict[str, Built], tmp_path: Path, name: str, tensor: str
) -> None:
    draft = ModelDraft.read(models[name].path)
    del draft.tensors[tensor]
    with pytest.raises(ModelFileError) as caught:
        load_model(draft.write(tmp_path / "m.gguf"))
    assert f"the tensor {tensor} is missing" in str(caught.value)
