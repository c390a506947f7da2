"""Models with a recurrent state: any cut of it, answers over many turns, exact memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import ContextShifted, LoadParams, Model, Planner, SamplingParams, load_model
from engine.errors import ModelFileError
from tests.helpers.answers import ask, ids_of
from tests.helpers.golden import TOLERANCE, nmse
from tests.helpers.hf_models import FAMILIES
from tests.helpers.model_draft import ModelDraft
from tests.helpers.tiny_gguf import tiny_gguf

BY_NAME = {family.name: family for family in FAMILIES}
KINDS = ("mamba", "mamba2", "jamba", "falcon-h1", "granitehybrid", "nemotron_h_moe-latent", "lfm2")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

Build = Callable[[str], tuple[Path, list[int], Any]]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Write a family's model once; return its path, token ids and their logits."""
    folder, built = tmp_path_factory.mktemp("recurrent"), {}

    def build(name: str) -> tuple[Path, list[int], Any]:
        if name not in built:
            path = folder / f"{name}.gguf"
            built[name] = (path, *BY_NAME[name].build(path))
        return built[name]

    return build


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(KINDS),
    split=st.lists(st.integers(0, 5), min_size=2, max_size=10).filter(any),
    mode=st.sampled_from(["tensor", "tensor", "tensor", "layer"]),
    n_batch=st.sampled_from([5, 64]),
)
def test_any_split_equals_transformers(
    build: Build, name: str, split: list[int], mode: str, n_batch: int
) -> None:
    """More ranks than groups, heads or units of channels, too; predicted bytes are exact."""
    path, ids, expected = build(name)
    options: dict[str, Any] = {"split_mode": mode, "kv_type": "f32", "n_batch": n_batch}
    with load_model(path, ["cpu"] * len(split), split, n_ctx=64, **options) as model:
        assert nmse(model.logits(ids), expected) <= TOLERANCE
        for memory in model.memory():
            assert memory.measured.kv == memory.predicted.kv
            assert memory.measured.weights == memory.predicted.weights


@pytest.mark.parametrize("override", ["ssm_|shortconv", "attn_", r"blk\.1\."])
@pytest.mark.parametrize("name", ["falcon-h1", "jamba", "lfm2"])
def test_a_part_on_another_rank_changes_nothing(build: Build, name: str, override: str) -> None:
    path, ids, expected = build(name)
    options: dict[str, Any] = {"overrides": [(override, "cpu")], "kv_type": "f32", "n_ctx": 64}
    with load_model(path, ["cpu"] * 4, [0, 1, 2, 1], **options) as model:
        assert nmse(model.logits(ids), expected) <= TOLERANCE


def test_the_state_does_not_grow_with_the_context(build: Build) -> None:
    """Only the layers with attention need more; a model without any needs no more at all."""

    def kv(name: str, n_ctx: int, **wished: Any) -> list[int]:
        path = build(name)[0]
        params = LoadParams(str(path), ("cpu",) * 2, n_ctx=n_ctx, kv_type="f16", **wished)
        return [device.memory.kv for device in Planner(path).plan(params).devices]

    n_layer, n_inner, n_taps, n_state = 3, 144, 4, 9
    one = n_layer * n_inner * (n_taps - 1 + n_state) * 4
    assert sum(kv("mamba", 64, draft="off")) == 2 * one
    assert sum(kv("mamba", 64)) == 8 * one, "one for each of seven guesses"
    assert kv("mamba", 64) == kv("mamba", 4096)
    width, f16 = 2 * 2 * 16, 2
    assert sum(kv("jamba", 1024)) - sum(kv("jamba", 512)) == 512 * width * f16


@pytest.mark.parametrize(("name", "n_in"), [("mamba", 288), ("mamba2", 360), ("lfm2", 192)])
def test_working_memory_grows_with_the_tokens_of_a_pass(build: Build, name: str, n_in: int) -> None:
    """At least by the inputs of the largest recurrent layer and the stream."""
    path, f32 = build(name)[0], 4

    def compute(n_batch: int) -> int:
        params = LoadParams(str(path), n_ctx=512, n_batch=n_batch)
        return Planner(path).plan(params).devices[0].memory.compute

    growth = (compute(512) - compute(256)) / 256 / f32
    stream = 6 * {"mamba": 72}.get(name, 64)
    assert growth > stream + n_in


def best(model: Model, prompt: list[int], sampled: list[int]) -> list[int]:
    """Return the tokens that one pass over everything gives from the prompt's end on."""
    return model.logits(prompt + sampled)[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("name", ["mamba", "falcon-h1", "lfm2"])
def test_answers_over_several_turns(build: Build, name: str) -> None:
    """A conversation goes on from where a state was kept; where there is none, it begins again."""
    path, ids, _ = build(name)
    options: dict[str, Any] = {"n_ctx": 64, "n_batch": 8, "kv_type": "f32"}
    with (
        load_model(path, ["cpu"] * 3, [3, 1, 2], **options) as model,
        load_model(path, **options) as other,
    ):

        def turn(prompt: list[int], n_known: int) -> list[int]:
            sampled, n_kept = ask(model, prompt)
            assert n_kept == n_known
            assert sampled == best(other, prompt, sampled)
            return sampled

        first = turn(ids[:20], 0)
        longer = ids[:20] + first + ids[20:25]
        second = turn(longer, 20 + len(first) - 1)  # the last sampled token was not computed
        last = longer + second + ids[25:28]
        third = turn(last, len(longer) + len(second) - 1)
        assert turn(last, len(last) - 1) == third  # from the copy before the prompt's last token
        assert turn(longer, len(longer) - 1) == second
        turn(longer[:20], 19)
        turn(longer[:15], 0)
        turn(ids[10:30], 0)


def test_an_answer_that_was_broken_off_does_not_spoil_the_next(build: Build) -> None:
    path, ids, _ = build("granitehybrid")
    with load_model(path, ["cpu"] * 2, n_ctx=64, n_batch=8, kv_type="f32") as model:
        whole, _ = ask(model, ids)
        for n_asked in (2, 4):  # within the prompt, and within the answer
            asked = iter([False] * n_asked)
            list(model.generate(ids[::-1], GREEDY, lambda asked=asked: next(asked, True)))
            assert ask(model, ids)[0] == whole


@pytest.mark.parametrize("step", ["load_slot", "save_slot"])
def test_a_state_that_was_half_copied_is_not_used(
    build: Build, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """An interrupt may come while states are being copied, on some ranks and not on others."""
    path, ids, _ = build("mamba2")
    with load_model(path, ["cpu"] * 2, n_ctx=64, kv_type="f32") as model:
        whole, _ = ask(model, ids[:20])
        longer = ids[:20] + whole + ids[20:25]
        end, _ = ask(model, longer)

        @torch.inference_mode()
        def half(slot: int, *_: object) -> None:
            rank = model.runtime.ranks[0]
            for state in rank.states:
                rank.context.cache.tensors(state, slot)["ssm"].fill_(3.0)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(model.runtime.runner, step, half)
            with pytest.raises(KeyboardInterrupt):
                ask(model, longer)
        assert ask(model, longer)[0] == end
        assert ask(model, ids[:20])[0] == whole


def test_a_full_context_is_computed_again_without_its_older_half(build: Build) -> None:
    path, ids, _ = build("nemotron_h")
    n_ctx = 32
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, on_overflow="shift")
    with load_model(path, ["cpu"] * 2, n_ctx=n_ctx, kv_type="f32") as model:
        events = list(model.generate(ids[:20], params))
        assert sum(isinstance(event, ContextShifted) for event in events) == 2
        seen, expected = ids[:20], []
        while len(expected) < params.max_tokens:
            expected.append(int(model.logits(seen)[-1].argmax()))
            seen = seen[n_ctx // 2 :] if len(seen) == n_ctx else seen
            seen = [*seen, expected[-1]]
    assert ids_of(events) == expected


def test_a_window_holds_for_every_layer_with_attention(build: Build, tmp_path: Path) -> None:
    path, ids, full = build("lfm2")
    draft = ModelDraft.read(path).changed({"lfm2.attention.sliding_window": 8})
    with load_model(draft.write(tmp_path / "m.gguf"), kv_type="f32", n_ctx=64) as model:
        windowed = model.logits(ids)
    np.testing.assert_allclose(windowed[:8], full[:8], atol=1e-4)
    assert np.abs(windowed[8:] - full[8:]).max() > 0.01


CONTRADICTIONS = [
    ("mamba", {"ssm.inner_size": 128}, "blk.0.ssm_in.weight has shape (288, 72) instead of"),
    ("mamba", {"ssm.inner_size": 0}, "'mamba.ssm.inner_size' is 0"),
    ("mamba", {"ssm.inner_size": None}, "lacks 'mamba.ssm.inner_size'"),
    ("mamba", {"ssm.time_step_rank": 6}, "blk.0.ssm_x.weight has shape"),
    ("mamba", {"ssm.state_size": 1 << 24}, "blk.0.ssm_x.weight has shape"),
    ("mamba", {"ssm.conv_kernel": 3}, "blk.0.ssm_conv1d.weight has shape"),
    ("mamba", {"ssm.dt_b_c_rms": "yes"}, "ssm.dt_b_c_rms"),
    ("mamba2", {"ssm.time_step_rank": 7}, "128 channels, 7 heads and 2 groups"),
    ("mamba2", {"ssm.time_step_rank": 4}, "blk.0.ssm_in.weight has shape"),
    ("mamba2", {"ssm.group_count": 0}, "8 heads and 0 groups"),
    ("mamba2", {"ssm.group_count": 3}, "8 heads and 3 groups"),
    ("mamba2", {"ssm.group_count": 16}, "8 heads and 16 groups"),
    ("mamba2", {"ssm.group_count": None}, "lacks 'mamba2.ssm.group_count'"),
    ("jamba", {"attention.head_count_kv": [0, 0, 0]}, "blk.2.ssm_in.weight is missing"),
    ("jamba", {"attention.head_count_kv": [0, 0, 3]}, "4 query heads cannot share 3"),
    ("jamba", {"attention.head_count": 0}, "0 query heads cannot share 2"),
    ("nemotron_h", {"feed_forward_length": [0, 104, 0, 0]}, "blk.3.ssm_in.weight is missing"),
    ("nemotron_h", {"feed_forward_length": [104] * 4}, "blk.0.ffn_up.weight is missing"),
    ("nemotron_h_moe-latent", {"moe_latent_size": 48}, "blk.1.ffn_up_exps.weight has shape"),
    ("nemotron_h_moe-latent", {"moe_latent_size": None}, "blk.1.ffn_up_exps.weight has shape"),
    ("lfm2", {"shortconv.l_cache": 4}, "blk.0.shortconv.conv.weight has shape"),
    ("lfm2", {"attention.sliding_window": -1}, "'lfm2.attention.sliding_window' is -1"),
]


@pytest.mark.parametrize(("name", "meta", "problem"), CONTRADICTIONS, ids=str)
def test_sizes_that_contradict_each_other_are_refused(
    build: Build, tmp_path: Path, name: str, meta: dict[str, Any], problem: str
) -> None:
    draft = ModelDraft.read(build(name)[0]).changed(meta, f"{BY_NAME[name].arch}.")
    with pytest.raises(ModelFileError) as caught:
        load_model(draft.write(tmp_path / "m.gguf"), ["cpu"] * 2)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("mamba2", "blk.1.ssm_norm.weight"),
        ("granitehybrid", "blk.0.ssm_norm.weight"),
        ("jamba", "blk.0.ssm_b_norm.weight"),
        ("mamba", "blk.0.ssm_d"),
        ("lfm2", "token_embd_norm.weight"),
    ],
)
def test_a_missing_tensor_is_named(build: Build, tmp_path: Path, name: str, tensor: str) -> None:
    draft = ModelDraft.read(build(name)[0])
    del draft.tensors[tensor]
    with pytest.raises(ModelFileError) as caught:
        load_model(draft.write(tmp_path / "m.gguf"))
    assert f"the tensor {tensor} is missing" in str(caught.value)


def test_kept_states_take_host_memory_that_is_left(build: Build) -> None:
    path, _, _ = build("mamba")
    params = LoadParams(str(path), ("cpu", "cpu"), (3, 1))
    with load_model(path, ["cpu"], n_ctx=64) as model:
        (rank,) = model.runtime.ranks
        n_bytes = sum(t.nbytes for t in rank.context.cache.recurrent_tensors([0]))
    planner = Planner(path)
    plain = planner.plan(params)
    assert plain.checkpoint_bytes == 64 * n_bytes
    assert planner.plan(params, {"cpu": 1 << 40}).checkpoint_bytes == 64 * n_bytes
    needed = sum(d.memory.total for d in plain.devices)
    free = {"cpu": needed * 4 // 3}
    few = planner.plan(params, free)
    assert few.checkpoint_bytes == (free["cpu"] - needed) // 4 < 64 * n_bytes
    assert few.bytes_by_device() == {"cpu": needed + few.checkpoint_bytes}
    least = planner.plan(params, {"cpu": 1})
    assert (least.checkpoint_bytes, least.shortages({"cpu": 1}).keys()) == (0, {"cpu"})
    for asked in (0, 3 * needed):
        found = planner.plan(replace(params, checkpoint_bytes=asked), free)
        assert found.bytes_by_device() == {"cpu": needed + asked}
        assert bool(found.shortages(free)) == bool(asked)


def test_a_model_without_recurrent_states_keeps_none(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    params = LoadParams(str(path), checkpoint_bytes=1 << 20)
    assert Planner(path).plan(params).checkpoint_bytes == 0
