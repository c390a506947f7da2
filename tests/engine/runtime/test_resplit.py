"""Re-splits of a loaded model: what moves, what it costs, and what a failure leaves."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import (
    Cancelled,
    EngineError,
    LoadProgress,
    Model,
    ModelFileError,
    OutOfDeviceMemory,
    SamplingParams,
    SplitError,
    load_model,
)
from engine.backends.cpu.backend import CpuBackend
from engine.model.forward.cache import Cache
from engine.model.forward.state import CacheSize, KVState
from engine.model.sharding.shares import Ranges
from engine.runtime import resplit as resplit_module
from tests.helpers.answers import ask
from tests.helpers.control_vector import write_control_vector
from tests.helpers.hf_models import FAMILIES
from tests.helpers.passes import forward_alone
from tests.helpers.prepared_templates import wait_for_templates
from tests.helpers.tiny_gguf import tiny_gguf

PROMPT = list(range(5, 15))
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model file with six blocks of 0.3 MB in Q8_0."""
    folder = tmp_path_factory.mktemp("model")
    return tiny_gguf(
        folder / "m.gguf", n_layer=6, n_embd=128, n_head=8, n_head_kv=4, n_ff=512, quant="Q8_0"
    )


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    """Yield a model on two ranks with a conversation in its cache."""
    with load_model(path, ["cpu"] * 2, [3, 1]) as loaded:
        ask(loaded, PROMPT, 6)
        yield loaded


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Disable garbage collection, as in the window; `gc` tracks only what is made from now on."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


def next_logits(model: Model) -> Any:
    return forward_alone(model.runtime.runner, [7], model.n_cached)


def addresses(model: Model) -> list[dict[str, int]]:
    """Return the address of each rank's tensors, by their names."""
    found = []
    for rank in model.runtime.ranks:
        mine = {}
        for index, slot in enumerate(rank.slots):
            value = rank.value(index)
            if value is not None:
                held = getattr(value, "planes", getattr(value, "data", value))
                mine[slot.tensor.name] = held.data_ptr()
        for index, layer in enumerate(rank.context.cache.layers):
            mine[f"cache {index}"] = layer.k.data_ptr()
        found.append(mine)
    return found


def held_bytes() -> int:
    """Return the bytes of all living tensors, without those of a few numbers."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(n for n in storages.values() if n >= 1024)


def test_an_answer_goes_on_while_it_is_split_anew(path: Path) -> None:
    with load_model(path) as model:
        expected, _ = ask(model, PROMPT, 8)
    steps: list[Callable[[Model], None]] = [
        lambda m: m.resplit([1, 1]),
        lambda m: m.resplit([1, 0, 2], devices="cpu,cpu,cpu"),
        lambda m: m.resplit(None, devices=["cpu"] * 2, split_mode="layer"),
        lambda m: m.resplit([1, 1], overrides=[(r"blk\.[01]\.ffn", "cpu")], split_mode="tensor"),
        lambda m: m.resplit(None, devices="cpu", overrides=()),
    ]
    with load_model(path, ["cpu"] * 2, [3, 1]) as model:
        sampled = []
        for event in model.generate(PROMPT, GREEDY):
            sampled += getattr(event, "ids", ())
            if steps:
                steps.pop(0)(model)
        assert not steps
    assert sampled == expected


def test_what_shares_memory_is_kept_together_or_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys' matrices of one shared head stay as they are, but not what they would lie beside."""
    path = tiny_gguf(tmp_path / "m.gguf", n_layer=2, n_head=8, n_head_kv=1, n_ff=512)
    with load_model(path, ["cpu"] * 2, [3, 1]) as old, load_model(path, ["cpu"] * 2) as new:

        def kept() -> set[str]:
            found = resplit_module._kept_slots(old.runtime.ranks, new.runtime.ranks)
            return {old.runtime.ranks[0].slots[index].tensor.name for _, index in found}

        apart = kept()
        assert "blk.0.attn_k.weight" in apart
        assert "blk.0.attn_q.weight" not in apart
        monkeypatch.setattr(CpuBackend, "has_arenas", True)
        together = kept()
    assert not any("attn_k.weight" in name or "attn_v.weight" in name for name in together)
    assert "blk.0.attn_norm.weight" in together


def threads_of(model: Model) -> list[int]:
    return [r.backend.worker.n_threads for r in model.runtime.ranks if r.backend.records]  # type: ignore[attr-defined]


def test_all_that_is_told_of_a_model_follows(path: Path) -> None:
    with load_model(path, ["cpu"] * 2, [3, 1], cpu_threads=2) as model:
        assert [
            rank.backend.worker.n_threads for rank in model.runtime.ranks if rank.backend.records
        ] == [1, 1]
        model.resplit(None, devices=["cpu"])
        assert model.params.devices == ("cpu",)
        assert [d.effective for d in model.plan.devices] == [1.0]
        assert model.n_threads == 2
        assert [
            rank.backend.worker.n_threads for rank in model.runtime.ranks if rank.backend.records
        ] == [2]
        model.resplit([1, 2, 1], devices=["cpu"] * 3)
        assert [d.asked for d in model.plan.devices] == [0.25, 0.5, 0.25]
        for memory in model.memory():
            assert memory.measured.weights == memory.predicted.weights > 0
            assert memory.measured.kv == memory.predicted.kv > 0


def test_threads_of_the_old_split_end(model: Model) -> None:
    model.resplit(None, devices=["cpu"] * 4)
    ranks = [t.name for t in threading.enumerate() if t.name.startswith("tandem-rank")]
    assert sorted(ranks) == [f"tandem-rank-{n}" for n in range(4)]


def test_tokens_are_recorded_anew(model: Model) -> None:
    def are_recorded() -> bool:
        return all(rank.recordings for rank in model.runtime.ranks)

    assert are_recorded()
    for devices in (["cpu"] * 3, ["cpu"]):
        model.resplit(None, devices=devices)
        assert not any(rank.recordings for rank in model.runtime.ranks)
        ask(model, PROMPT, 6)
        assert are_recorded()


def test_nothing_moves_that_can_stay(model: Model) -> None:
    """With the same split, no byte of the file is read, and all tensors stay where they are."""
    before, progress = addresses(model), list[LoadProgress]()
    model.resplit([6, 2], on_progress=progress.append)
    assert addresses(model) == before
    assert progress == []


def test_ranks_that_change_places_take_their_tensors_along(path: Path) -> None:
    """All ranks are on one device, so a rank can take the tensors of another one."""
    with load_model(path, ["cpu"] * 2, [1, 2], split_mode="layer") as model:
        first, second = addresses(model)
        model.resplit([1, 1, 1], devices=["cpu"] * 3)
        one, two, three = addresses(model)
    blocks = {name: at for name, at in first.items() if name.startswith("blk.")}
    assert {name: one[name] for name in blocks} == blocks, "the first rank keeps its two blocks"
    others = {name: at for name, at in second.items() if name.startswith("blk.")}
    found = two | three
    assert {name: found[name] for name in others} == others
    assert two.keys().isdisjoint(name for name in three if name.startswith("blk."))


def test_norms_stay_where_matrices_move(model: Model) -> None:
    before, done = addresses(model), list[LoadProgress]()
    model.resplit([1, 1], on_progress=done.append)
    after = addresses(model)
    for mine, theirs in zip(before, after, strict=True):
        same = {name for name in mine if theirs.get(name) == mine[name]}
        assert "blk.3.attn_norm.weight" in same
        assert "blk.3.ffn_up.weight" not in same
    assert done[-1].done_bytes == done[-1].total_bytes
    assert 0 < done[-1].total_bytes < model.plan.file_bytes


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("backend", ["", "reference"])
@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_a_device_never_holds_much_more_than_before_or_after(
    path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, mode: str
) -> None:
    """The bytes of all living tensors are counted at every step.

    Ranks, which share a device here, take their steps one at a time: what each reads a file with
    would else be counted by chance, as another one's step ends.
    """
    monkeypatch.setenv("TANDEM_BACKEND", backend)
    with load_model(path, ["cpu"] * 2, [3, 1]) as model:
        ask(model, PROMPT, 6)
        seen, one_at_a_time = [], threading.Lock()

        def counted(name: str) -> None:
            original = getattr(resplit_module, name)

            def call(*args: Any) -> None:
                with one_at_a_time:
                    original(*args)
                    seen.append(held_bytes())

            monkeypatch.setattr(resplit_module, name, call)

        def holds() -> int:
            return sum(m.measured.weights + m.measured.kv for m in model.memory())

        before = holds()
        counted("load_rank")
        counted("copy_state")
        model.resplit(None, devices=["cpu"] * 3, split_mode=mode)
        after = holds()
    assert len(seen) > 6
    block = max(before, after) // 6
    assert max(seen) <= max(before, after) + block
    assert after * 0.9 < before < after * 1.1, "so it was never held twice"


def fails_at(n: int, error: BaseException) -> Callable[..., None]:
    """Return a function that fails once, at its n-th call."""
    calls = 0

    def call(*args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == n:
            raise error

    return call


def check_unchanged(model: Model, act: Callable[[], None], error: type[EngineError]) -> EngineError:
    """Check that after a failed attempt the model is as before, and can still be re-split."""
    wait_for_templates()
    n_threads, params = threading.active_count(), model.params
    state = Path(str(model.params.path) + ".state")
    model.save_state(state)
    saved, before = state.read_bytes(), next_logits(model)
    with pytest.raises(error) as failed:
        act()
    assert model.params == params
    model.save_state(state)
    assert state.read_bytes() == saved
    assert np.array_equal(next_logits(model), before)
    for memory in model.memory():
        assert memory.measured.weights == memory.predicted.weights
    assert threading.active_count() == n_threads
    model.resplit([1, 1, 1], devices=["cpu"] * 3)
    model.save_state(state)
    assert state.read_bytes() == saved
    return failed.value


@pytest.mark.parametrize("n", [1, 2, 15, 40, 90])
def test_who_cancels_keeps_the_old_split(model: Model, n: int) -> None:
    asked = 0

    def is_cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked >= n

    def act() -> None:
        model.resplit([1, 2, 2], devices=["cpu"] * 3, is_cancelled=is_cancelled)

    failed = check_unchanged(model, act, Cancelled)
    assert str(failed) == "Re-splitting was cancelled."
    assert asked >= n


@pytest.mark.parametrize("n", [1, 7, 14])
@pytest.mark.parametrize("where", ["load_rank", "copy_state"])
def test_a_full_device_keeps_the_old_split(
    model: Model, monkeypatch: pytest.MonkeyPatch, where: str, n: int
) -> None:
    fail, original = fails_at(n, MemoryError()), getattr(resplit_module, where)

    def call(*args: Any) -> None:
        original(*args)
        fail()

    monkeypatch.setattr(resplit_module, where, call)
    failed = check_unchanged(
        model, lambda: model.resplit(None, devices=["cpu"] * 4), OutOfDeviceMemory
    )
    assert "needed to re-split the model" in str(failed)


def test_one_that_would_not_fit_is_refused_before_anything_is_read(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that the model itself holds counts as free."""
    held = sum(m.measured.weights + m.measured.kv for m in model.memory())
    needed = model.plan.total_bytes

    def free(n_bytes: int) -> None:
        monkeypatch.setattr(
            "engine.runtime.thread_runtime.free_bytes", lambda devices: {"cpu": n_bytes}
        )

    free(needed - held - 5000)
    with monkeypatch.context() as patch:
        patch.setattr(resplit_module, "load_rank", lambda *args: pytest.fail("read"))
        check = pytest.raises(OutOfDeviceMemory)
        with check:
            model.resplit([3, 1.01])
    free(needed - held + 5000)
    model.resplit([3, 1.01])


@pytest.mark.parametrize("n", [1, 4])
def test_an_interrupt_keeps_the_old_split(
    model: Model, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    before = next_logits(model)
    fail, original = fails_at(n, KeyboardInterrupt()), resplit_module.next_move

    def call(*args: Any) -> int:
        fail()
        return original(*args)

    monkeypatch.setattr(resplit_module, "next_move", call)
    with pytest.raises(KeyboardInterrupt):
        model.resplit(None, devices=["cpu"] * 3)
    assert np.array_equal(next_logits(model), before)


@pytest.mark.usefixtures("no_gc")
def test_a_failure_leaves_no_weights_behind_though_the_error_is_kept(path: Path) -> None:
    model = load_model(path, ["cpu"] * 2, [3, 1])
    before, asked = held_bytes(), 0

    def is_cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 60

    with pytest.raises(Cancelled) as kept:
        model.resplit(None, devices=["cpu"] * 3, is_cancelled=is_cancelled)
    kept.value.__traceback__ = None
    del kept
    assert held_bytes() <= before
    model.resplit(None, devices=["cpu"] * 3)
    assert held_bytes() <= before * 1.05, "of the old split nothing is left"
    model.close()


def test_a_file_that_is_gone_keeps_the_old_split(path: Path, tmp_path: Path) -> None:
    mine = tmp_path / "m.gguf"
    mine.write_bytes(path.read_bytes())
    with load_model(mine) as model:
        expected, _ = ask(model, PROMPT, 4)
        mine.unlink()
        with pytest.raises(ModelFileError, match="There is no file"):
            model.resplit(None, devices=["cpu"] * 2)
        mine.write_bytes(tiny_gguf(tmp_path / "other.gguf", seed=1).read_bytes())
        with pytest.raises(ModelFileError, match=r"m\.gguf has changed since") as changed:
            model.resplit(None, devices=["cpu"] * 2)
        assert changed.value.hint == "Load it again."
        assert ask(model, PROMPT, 4)[0] == expected


def test_a_file_that_was_touched_counts_as_changed(path: Path, tmp_path: Path) -> None:
    mine = tmp_path / "m.gguf"
    mine.write_bytes(path.read_bytes())
    with load_model(mine) as model:
        os.utime(mine, ns=(1, 1))
        with pytest.raises(ModelFileError, match="has changed"):
            model.resplit(None, devices=["cpu"] * 2)


def test_a_model_that_cannot_be_brought_back_is_closed_and_says_so(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = resplit_module.load_rank

    def broken(*args: Any) -> None:
        original(*args)
        if len(seen := [*broken_at, 1]) > 12:
            raise EngineError("The disk is gone.")
        broken_at[:] = seen

    broken_at: list[int] = []
    monkeypatch.setattr(resplit_module, "load_rank", broken)
    with pytest.raises(EngineError, match="disk is gone") as failed:
        model.resplit(None, devices=["cpu"] * 3)
    assert "could not be restored" in failed.value.hint
    assert not model.is_loaded
    for use in (
        lambda: ask(model, PROMPT),
        lambda: model.resplit([1]),
        lambda: model.save_state("x"),
    ):
        with pytest.raises(EngineError, match="unloaded"):
            use()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"split": [0, 0]}, "at least one above 0"),
        ({"split": [1, 2, 3]}, "3 numbers, but there are 2 devices"),
        ({"split": ["x"]}, "not a list of numbers"),
        ({"split": [1, 1], "split_mode": "diagonal"}, "split_mode"),
        ({"split": [1, 1], "devices": ["gpu"]}, "'gpu'"),
    ],
)
def test_splits_that_cannot_be_meant_are_refused(
    model: Model, changes: dict[str, Any], sentence: str
) -> None:
    before = model.runtime
    with pytest.raises(EngineError, match=sentence):
        model.resplit(**changes)
    assert model.runtime is before


@pytest.mark.parametrize("change", [{"n_ctx": 32}, {"kv_type": "f32"}, {"path": "other.gguf"}])
def test_only_the_split_can_change(model: Model, change: dict[str, Any]) -> None:
    with pytest.raises(SplitError, match=f"'{next(iter(change))}' cannot be changed"):
        model.split_as(replace(model.params, **change))


def test_control_vectors_steer_after_it_too(path: Path, tmp_path: Path) -> None:
    vectors = {n: np.full(128, 0.1 * n, np.float32) for n in range(1, 6)}
    steering = write_control_vector(tmp_path / "c.gguf", vectors)
    with load_model(path, ["cpu"] * 2, control_vectors=[(steering, 0.5)]) as fresh:
        expected = fresh.logits(PROMPT)
    with load_model(path, control_vectors=[(steering, 0.5)]) as model:
        steering.unlink()  # it is not read again
        model.resplit(None, devices=["cpu"] * 2)
        assert np.array_equal(model.logits(PROMPT), expected)


def test_a_recurrent_state_can_still_go_back(tmp_path: Path) -> None:
    """Saved copies move along, so the same prompt is not computed from its start again."""
    (family,) = (f for f in FAMILIES if f.name == "mamba2")
    ids, _ = family.build(tmp_path / "m.gguf")
    with load_model(tmp_path / "m.gguf", ["cpu"] * 2, [3, 1], n_ctx=64) as model:
        expected, _ = ask(model, ids[:12], 5)
        model.resplit([1, 2, 1], devices=["cpu"] * 3)
        assert ask(model, ids[:12], 5) == (expected, 11)


def test_an_empty_cache_is_no_obstacle(path: Path) -> None:
    with load_model(path) as fresh:
        expected, _ = ask(fresh, PROMPT, 6)
    with load_model(path) as model:
        model.resplit(None, devices=["cpu"] * 3)
        assert ask(model, PROMPT, 6) == (expected, 0)


def test_a_cache_in_the_hosts_memory_is_no_cpu_ranks_cache() -> None:
    """Both caches lie in host memory, but attention is computed on different devices."""
    heads = Ranges(((0, 2),), 2)
    state = KVState(heads, heads, 16, 16)
    on_cpu, on_host, again = (
        Cache([state], 0, CacheSize(8), torch.device(device), kv_on_host=is_on_host)
        for device, is_on_host in (("cpu", False), ("meta", True), ("meta", True))
    )
    assert on_cpu.allocation(state) == on_host.allocation(state)
    assert on_cpu.memory_key(state) != on_host.memory_key(state) == again.memory_key(state)


SPLITS = st.fixed_dictionaries(
    {
        "split": st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any).map(tuple),
        "split_mode": st.sampled_from(["tensor", "layer", "groups"]),
        "n_cpu_moe": st.integers(0, 3),
        "n_cpu_blocks": st.integers(0, 3),
        "overrides": st.sampled_from(
            [(), ((r"blk\.[02]\.attn", "#0"),), ((r"ffn_up_exps", "cpu"), (r"output", "#0"))]
        ),
    }
)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, Path, Any]]:
    """Yield a model with experts, its saved conversation, and the logits that follow it."""
    (family,) = (f for f in FAMILIES if f.name == "mixtral")
    folder = tmp_path_factory.mktemp("moe")
    ids, _ = family.build(folder / "m.gguf")
    with load_model(folder / "m.gguf", n_ctx=64) as model:
        ask(model, ids[:12], 3)
        model.save_state(folder / "state")
        yield model, folder / "state", next_logits(model)


@settings(max_examples=25, deadline=None)
@given(wanted=SPLITS)
def test_any_pattern_of_shares_can_follow_any_other(
    moe: tuple[Model, Path, Any], wanted: dict[str, Any]
) -> None:
    model, state, expected = moe
    devices = ("cpu",) * len(wanted["split"])
    model.split_as(replace(model.params, devices=devices, **wanted))
    model.save_state(state.with_name("after"))
    assert state.with_name("after").read_bytes() == state.read_bytes()
    assert np.abs(next_logits(model) - expected).max() < 5e-2
    for memory in model.memory():
        assert memory.measured.weights == memory.predicted.weights
        assert memory.measured.kv == memory.predicted.kv
