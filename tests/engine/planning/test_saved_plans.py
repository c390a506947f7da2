"""Saved plans come back, for the right model and on the right GPUs; damaged files are kept."""

import json
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import pytest

from engine import (
    ControlVector,
    DeviceInfo,
    EngineError,
    LoadParams,
    ModelKey,
    PlanBadge,
    Planner,
    PlanStore,
    SavedPlan,
    export_plan,
    fastest_plan,
    import_plan,
    model_key,
)
from engine.arguments import params_document, params_from
from tests.helpers.tiny_gguf import tiny_gguf

MODEL = ModelKey("ab" * 32, "Some Model 7B", 4_000_000_000)
BADGE = PlanBadge(812.5, 41.25, 8192, "2026-03-01T12:00:00Z")
EVERYTHING = LoadParams(
    "/somewhere/m.gguf", ("cuda:0", "cuda:1", "cuda:0"), (3, 1.5, 0.1), "groups",
    n_ctx=8192, overrides=(("ffn_.*_exps=x", "cpu"), ("attn", "#1")), kv_type="q8_0",
    cpu_threads=6, n_batch=256, control_vectors=(ControlVector("/v.gguf", -0.5),),
    control_layers=(3, 9), groups=(2, 1), n_cpu_blocks=2, n_cpu_moe=1, kv_on_host=True,
    reserve=(("cuda:1", 1 << 30),), p2p="on", rope_scaling="linear", rope_factor=4.0,
    rope_base=5e5, chat_template="{{ messages }}",
)  # fmt: skip


def gpu(number: int, uuid: str, free: int = 1 << 40) -> DeviceInfo:
    return DeviceInfo(f"cuda:{number}", "cuda", "RTX 3090", 1 << 40, free, uuid=uuid)


CPU = DeviceInfo("cpu", "cpu", "Some CPU", 1 << 40, 1 << 40)
DEVICES = [gpu(0, "GPU-a"), gpu(1, "GPU-b"), CPU]


@pytest.fixture
def store(tmp_path: Path) -> PlanStore:
    return PlanStore(tmp_path / "plans")


def test_all_fields_survive_json() -> None:
    document = json.loads(json.dumps(params_document(EVERYTHING)))
    assert params_from(document, EVERYTHING.path) == EVERYTHING
    assert set(document) == {f.name for f in fields(LoadParams)} - {"path"}
    assert params_from({}, "m") == LoadParams("m")
    plain = LoadParams("m")
    assert params_from(json.loads(json.dumps(params_document(plain))), "m") == plain


@pytest.mark.parametrize(
    "wrong",
    [
        {"devices": "cpu"}, {"devices": [1]}, {"devices": ["toaster"]}, {"devices": []},
        {"split": ["a"]}, {"split": [True]}, {"split": [float("nan")]}, {"n_ctx": 1.5},
        {"n_ctx": True}, {"n_ctx": -1}, {"kv_type": "q9"}, {"kv_type": "q8_0/"}, {"split_mode": 3},
        {"overrides": [["a"]]}, {"overrides": [["a", "b", "c"]]},
        {"reserve": [["cpu", "1"]]}, {"kv_on_host": 1}, {"p2p": "maybe"}, {"p2p": True},
        {"control_vectors": [{"scale": 1}]}, {"control_layers": [5]}, {"groups": 2}, {"what": 1},
        {"n_batch": "512"}, {"cpu_threads": 0}, {"devices": ["cpu"] * 5000},
    ],
)  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(EngineError):
        params_from({**params_document(LoadParams("m")), **wrong}, "m")


@pytest.mark.parametrize("n_batch", [None, 512])
def test_a_chosen_batch_is_kept_and_none_stays_open(n_batch: int | None) -> None:
    params = LoadParams("m", n_batch=n_batch)
    assert params_from(params_document(params), "m") == params


def test_a_plan_comes_back_on_other_numbers_of_the_same_cards(store: PlanStore) -> None:
    store.save(MODEL, SavedPlan.of(" long  128k ", EVERYTHING, DEVICES, BADGE))
    (plan,) = PlanStore(store._folder).plans(MODEL)
    assert plan.name == "long 128k"
    assert plan.badge == BADGE
    assert plan.params.path == ""
    assert plan.resolved("/new.gguf", DEVICES) == replace(EVERYTHING, path="/new.gguf")
    swapped = plan.resolved("/m.gguf", [gpu(1, "GPU-a"), gpu(0, "GPU-b"), CPU])
    assert swapped.devices == ("cuda:1", "cuda:0", "cuda:1")
    assert swapped.reserve == (("cuda:0", 1 << 30),)
    assert swapped.overrides == EVERYTHING.overrides


def test_a_card_that_is_gone_is_named(store: PlanStore) -> None:
    plan = SavedPlan.of("both", EVERYTHING, DEVICES)
    with pytest.raises(EngineError, match=r"'both' needs RTX 3090 \(cuda:1\), which is not avail"):
        plan.resolved("m", [gpu(0, "GPU-a"), gpu(1, "GPU-other"), CPU])
    moved = SavedPlan.of("o", LoadParams("m", overrides=(("ffn", "cuda:1"),)), DEVICES)
    there = moved.resolved("m", [gpu(0, "GPU-b"), CPU])
    assert there.overrides == (("ffn", "cuda:0"),)


def test_plans_are_found_by_name_and_replaced_and_deleted(store: PlanStore) -> None:
    for name in ("slow", "Fast", "other"):
        store.save(MODEL, SavedPlan.of(name, LoadParams("m"), DEVICES))
    store.save(MODEL, SavedPlan.of("FAST", LoadParams("m", n_ctx=99), DEVICES))
    assert [plan.name for plan in store.plans(MODEL)] == ["FAST", "other", "slow"]
    assert store.find(MODEL, "fast").params.n_ctx == 99
    store.delete(MODEL, "Other")
    assert [plan.name for plan in store.plans(MODEL)] == ["FAST", "slow"]
    with pytest.raises(EngineError, match="no plan named 'other'") as caught:
        store.find(MODEL, "other")
    assert "'FAST', 'slow'" in caught.value.hint
    assert store.plans(ModelKey("cd" * 32, MODEL.name, MODEL.n_bytes)) == []


@pytest.mark.parametrize("name", ["", "  ", "auto", "AUTO", "a\x07b", "x" * 101])
def test_names_that_cannot_be_used(name: str) -> None:
    with pytest.raises(EngineError, match="cannot be the name"):
        SavedPlan.of(name, LoadParams("m"), DEVICES)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2, "plans": []}', "\x00"])
def test_a_damaged_file_is_set_aside(store: PlanStore, text: str) -> None:
    path = store._folder / MODEL.file_name
    path.parent.mkdir()
    path.write_text(text)
    assert store.plans(MODEL) == []
    store.save(MODEL, SavedPlan.of("a", LoadParams("m"), DEVICES))
    assert len(store.plans(MODEL)) == 1
    (kept,) = path.parent.glob("*.set-aside.json")
    assert kept.read_text() == text


def test_one_damaged_plan_does_not_spoil_the_others(store: PlanStore) -> None:
    for name in ("a", "b", "c"):
        store.save(MODEL, SavedPlan.of(name, LoadParams("m"), DEVICES, BADGE))
    path = store._folder / MODEL.file_name
    document = json.loads(path.read_text())
    document["plans"][0]["params"]["n_ctx"] = "many"
    document["plans"][1]["badge"]["decode_ts"] = float("inf")
    path.write_text(json.dumps(document))
    assert [plan.name for plan in store.plans(MODEL)] == ["c"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(EngineError, match="cannot be written") as caught:
        PlanStore(blocked / "plans").save(MODEL, SavedPlan.of("a", LoadParams("m"), DEVICES))
    assert caught.value.hint.startswith("Free up disk space")


def test_exporting_and_importing(tmp_path: Path) -> None:
    plan = SavedPlan.of("both", EVERYTHING, DEVICES, BADGE)
    export_plan(plan, tmp_path / "p.json")
    assert import_plan(tmp_path / "p.json") == plan
    for text in ("", "{}", '{"kind": "tandem plan", "version": 9}', "[" * 100_000):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(EngineError):
            import_plan(tmp_path / "bad.json")
    with pytest.raises(EngineError, match="cannot be read"):
        import_plan(tmp_path / "none.json")
    with pytest.raises(EngineError, match="cannot be written") as caught:
        export_plan(plan, tmp_path / "p.json" / "x.json")
    assert caught.value.hint == "Choose another folder, or free up disk space."


def test_the_fastest_plan_that_fits_is_chosen(tmp_path: Path) -> None:
    path = str(tiny_gguf(tmp_path / "m.gguf", n_ctx=4096))

    def plan(name: str, speed: float, n_ctx: int, *devices: str) -> SavedPlan:
        badge = PlanBadge(1.0, speed, n_ctx, "") if speed else None
        return SavedPlan.of(name, LoadParams("m", devices, n_ctx=n_ctx), DEVICES, badge)

    plans = [
        plan("two", 50, 512, "cuda:0", "cuda:1"), plan("one", 40, 512, "cuda:0"),
        plan("cpu", 5, 4096, "cpu"), plan("unmeasured", 0, 1024, "cpu"),
    ]  # fmt: skip

    def chosen(devices: list[DeviceInfo], n_ctx: int = 0, of: list[SavedPlan] = plans) -> str:
        with closing(Planner(path)) as planner:
            found = fastest_plan(of, planner, path, devices, n_ctx)
        return found.name if found else ""

    assert chosen(DEVICES) == "two"
    assert chosen([gpu(0, "GPU-a"), gpu(1, "GPU-b", free=1000), CPU]) == "one"
    assert chosen([gpu(0, "GPU-c"), CPU]) == "cpu"
    assert chosen(DEVICES, n_ctx=1024) == "cpu"
    assert chosen(DEVICES, of=plans[3:]) == "unmeasured"
    assert chosen(DEVICES, n_ctx=9999) == ""


def test_a_model_is_known_under_any_name(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    key = model_key(path)
    assert model_key(path.rename(tmp_path / "other.gguf")) == key
    other = model_key(tiny_gguf(tmp_path / "n.gguf", seed=1))
    assert other.name == key.name
    assert other.file_name != key.file_name
    assert ModelKey("", "../../etc", 1).file_name.startswith("etc-")
