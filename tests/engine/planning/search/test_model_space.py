"""Candidates of a search: sets of devices, modes and fitting positions; and saved results."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from engine import (
    Calibration,
    EngineError,
    Forecaster,
    LoadParams,
    Planner,
    TuneFile,
    TunePlan,
    parse_rig,
)
from engine.hardware.fallbacks import Fallback
from engine.planning.search.model_space import Family, ModelSpace, group_sizes
from engine.planning.search.results import (
    GOALS,
    Region,
    Sample,
    Speeds,
    Trial,
    TuneResult,
    reason_for_best,
)
from engine.planning.search.results_file import result_document, result_from
from tests.helpers.tiny_gguf import tiny_gguf

CHAT = GOALS["chat"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("space")
    return str(
        tiny_gguf(folder / "m.gguf", n_layer=8, n_embd=256, n_ff=1024, n_head_kv=4, n_ctx=4096)
    )


@pytest.fixture
def planner(path: str) -> Iterator[Planner]:
    with closing(Planner(path)) as opened:
        yield opened


def space(
    planner: Planner, path: str, rig: str, free: dict[str, int] | None = None, **changes: object
) -> ModelSpace:
    forecaster = Forecaster.of_rig(parse_rig(rig))
    devices = tuple(device for device in forecaster.devices if device != "cpu")
    params = replace(LoadParams(path, devices), **changes)
    return ModelSpace(planner, params, CHAT, forecaster, free)


def named(families: object) -> set[tuple[tuple[str, ...], str, tuple[int, ...]]]:
    return {
        (f.params.devices, f.params.split_mode, f.params.group_sizes)
        for f in families  # type: ignore[attr-defined]
    }


def test_all_sets_and_modes_of_two_different_cards(planner: Planner, path: str) -> None:
    both = ("cuda:0", "cuda:1")
    found = space(planner, path, "1x3090,1x3060").families()
    assert named(found) == {
        (("cuda:0",), "tensor", ()), (("cuda:1",), "tensor", ()),
        (both, "tensor", ()), (both, "layer", ()),
    }  # fmt: skip
    assert [f.predicted_s for f in found] == sorted(f.predicted_s for f in found)


def test_equal_cards_are_tried_once_and_groups_begin_with_three(
    planner: Planner, path: str
) -> None:
    found = named(space(planner, path, "3x3090").families())
    assert sum(len(devices) == 1 for devices, _, _ in found) == 1
    assert sum(len(devices) == 2 for devices, _, _ in found) == 2
    assert {g for _, mode, g in found if mode == "groups"} <= {(1, 2), (2, 1)}
    assert any(mode == "groups" for _, mode, _ in found)
    assert group_sizes(4) == [(1, 3), (2, 2), (3, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)]
    assert group_sizes(2) == []
    assert group_sizes(6) == [None, (2, 2, 2), (3, 3)]


def test_many_cards_are_not_tried_in_all_sets(planner: Planner, path: str) -> None:
    assert len(space(planner, path, "7x3090,1x3060").families()) < 100


def test_a_split_begins_where_it_is_expected_to_be_best(planner: Planner, path: str) -> None:
    found = space(planner, path, "1x4090,1x3060")
    family = next(
        f for f in found.families() if len(f.start) == 2 and f.params.split_mode == "tensor"
    )
    at = found.handle(family, family.start, 0).nearest(family.start)
    handle = found.handle(family, family.start, 0)
    assert handle.nearest(handle.split(5)) == 5
    for other in (at // 2, (at + len(handle)) // 2):
        candidate = found.candidate(family, handle.split(other))
        assert candidate is None or seconds(candidate.predicted) >= family.predicted_s * 0.999


def seconds(speeds: Speeds | None) -> float:
    assert speeds is not None
    return CHAT.seconds(speeds.prefill_ts, speeds.decode_ts)


def test_what_does_not_fit_or_leaves_a_rank_out_is_no_candidate(
    planner: Planner, path: str
) -> None:
    even = LoadParams(path, ("cuda:0", "cuda:1"))
    none = {"cuda:0": 0}
    needed = planner.plan(even, none).shortages(none)["cuda:0"]
    free = {"cuda:0": needed, "cuda:1": 1 << 40, "cpu": 1 << 40}
    found = space(planner, path, "2x3090", free)
    family = Family(even, (1.0, 1.0), 1.0)
    assert found.candidate(family, (1.0, 1.0)) is not None
    assert found.candidate(family, (3.0, 1.0)) is None
    assert found.candidate(family, (0.0, 1.0)) is None
    assert (("cuda:0",), "tensor", ()) not in named(found.families())
    for region in found.regions():
        assert region.stop == 1.0
        assert 0.5 < region.start < 0.6 or region.split_mode == "layer"
        assert region.problem
    assert {region.split_mode for region in found.regions()} == {"tensor", "layer"}
    near = found.candidate(family, (2.0, 2.0))
    assert near is not None
    assert near.key == found.candidate(family, (1.0, 1.0)).key, "the same cut is tried once"  # type: ignore[union-attr]


def test_ranks_that_are_named_stay(planner: Planner, path: str) -> None:
    found = space(planner, path, "2x3090", overrides=(("attn", "#0"),))
    assert {f.params.devices for f in found.families()} == {("cuda:0", "cuda:1")}
    with pytest.raises(EngineError):
        space(planner, path, "2x3090", devices=("cuda:7",))


def test_a_search_is_announced(planner: Planner, path: str) -> None:
    forecaster = Forecaster.of_rig(parse_rig("2x3090"))
    params = LoadParams(path, ("cuda:0", "cuda:1"))
    estimate = TunePlan(planner, params, forecaster).estimate
    assert estimate.n_trials > 5
    assert estimate.n_choices == 3
    assert estimate.budget_s >= estimate.seconds > 0
    assert f"About {estimate.n_trials} trials" in estimate.sentence
    short = TunePlan(planner, params, forecaster, budget_s=2 * estimate.trial_s).estimate
    assert short.n_trials == 2
    tiny = TunePlan(planner, replace(params, n_ctx=20), forecaster).estimate
    assert tiny.size.n_prompt == tiny.size.n_gen == 20
    with pytest.raises(EngineError, match="No split of this model fits"):
        TunePlan(planner, params, forecaster, free_bytes=dict.fromkeys(forecaster.devices, 0))
    for wrong in ({"goal": "what"}, {"budget_s": 0.0}, {"budget_s": float("nan")}):
        with pytest.raises(EngineError):
            TunePlan(planner, params, forecaster, **wrong)  # type: ignore[arg-type]


def result(path: str = "m", model_hash: str = "ab") -> TuneResult:
    one = Trial(
        LoadParams(path, n_ctx=64), (1.0,), Sample((100.0, 110.0), (10.0, 12.0), (0.1,), (0.0,)),
        Speeds(90, 11), "Limited by tests.",
    )  # fmt: skip
    both = Trial(
        LoadParams(path, ("cpu", "cpu"), (3, 1)), (0.75, 0.25),
        Sample((60.0,), (6.0,), fallbacks=(Fallback("graph", ("cuda:0",), "it snows", "Wait."),)),
    )  # fmt: skip
    full = Trial(LoadParams(path, ("cuda:0",)), (1.0,), None, problem="It is full.")
    region = Region(("cpu", "cpu"), "tensor", 0.8, 1.0, "It is full.")
    trials = (one, both, full)
    return TuneResult(
        "Model", model_hash, 64, "A + B", CHAT, trials, (region,), 0, reason_for_best(trials, CHAT),
        12.5, False, "2026-03-01T12:00:00Z", (("cpu", 20.5),),
    )  # fmt: skip


def test_results_are_kept_for_each_model_context_and_machine(tmp_path: Path) -> None:
    file = TuneFile(tmp_path / "t.json")
    file.keep(result())
    file.keep(result(model_hash="cd"))
    again = TuneFile(tmp_path / "t.json")
    assert again.find("ab", 64, "A + B", "chat", "/new") == result("/new")
    for key in (("ef", 64, "A + B", "chat"), ("ab", 65, "A + B", "chat"), ("ab", 64, "A", "chat")):
        assert again.find(*key, "m") is None
    again.keep(replace(result(), seconds=1.0))
    found = TuneFile(tmp_path / "t.json").find("ab", 64, "A + B", "chat", "m")
    assert found is not None
    assert found.seconds == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"best": 7}, {"trials": [{}]}, {"goal": 3}, {"n_ctx": "x"}, {"regions": [[]]},
        {"reason": 3}, {"others": [["cpu"]]},
    ],
)  # fmt: skip
def test_damaged_results_are_forgotten(tmp_path: Path, change: dict[str, object]) -> None:
    good = json.loads(json.dumps(result_document(result())))
    assert result_from(good, "m") == result()
    assert result_from({**good, **change}, "m") is None
    (tmp_path / "t.json").write_text(json.dumps({"results": [{**good, **change}, good, 5]}))
    assert TuneFile(tmp_path / "t.json").find("ab", 64, "A + B", "chat", "m") == result()


def test_results_of_versions_that_did_not_watch_others_are_read() -> None:
    old = json.loads(json.dumps(result_document(result())))
    del old["others"]
    assert result_from(old, "m") == replace(result(), others=())


def test_what_a_cache_holds_teaches_nothing_about_larger_models(
    planner: Planner, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = parse_rig("1x3090")
    forecaster = Forecaster(rig.devices, rig.facts, rig.links, Calibration())
    params = LoadParams(path, ("cpu",))
    evaluation = planner.evaluate(params)
    large = planner.evaluate(params)
    monkeypatch.setattr(
        "engine.planning.speed.forecast.CACHED_BYTES", evaluation.plan.file_bytes + 1
    )
    before = forecaster.forecast(evaluation, params)
    assert before is not None
    for _ in range(2):
        forecaster.learn_decode(evaluation, params, "", before.decode.seconds / 5, 512)
    small = forecaster.forecast(evaluation, params)
    assert small is not None
    assert small.decode.seconds == pytest.approx(before.decode.seconds / 5)
    monkeypatch.setattr("engine.planning.speed.forecast.CACHED_BYTES", 0)
    other = forecaster.forecast(large, params)
    assert other is not None
    assert other.decode.seconds == pytest.approx(before.decode.seconds)
