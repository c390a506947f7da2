"""Forecasts from a file's header, on rigs and with the ratios of earlier runs."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from engine import DeviceFacts, Forecaster, LinkFacts, Links, LoadParams, Planner, parse_rig
from engine.hardware import backend_choice
from engine.planning.evaluation.evaluator import Evaluation
from engine.planning.speed.forecast import PROMPT_TOKENS, Calibration
from tests.helpers.hollow import hollow_llama, hollow_moe


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hollow_moe(tmp_path_factory.mktemp("hollow") / "m.gguf", n_layer=8)


@pytest.fixture
def planner(path: Path) -> Iterator[Planner]:
    with closing(Planner(path)) as planner:
        yield planner


RIG = parse_rig("2xH100,1x3060")


def params(path: Path, *devices: str, **options: object) -> LoadParams:
    return LoadParams(str(path), devices or ("cuda:0", "cuda:1"), **options)


def evaluated(planner: Planner, wanted: LoadParams) -> Evaluation:
    return planner.evaluate(wanted, RIG.free_bytes)


def speed(planner: Planner, wanted: LoadParams, n_prompt: int | None = None) -> float:
    found = Forecaster.of_rig(RIG).forecast(evaluated(planner, wanted), wanted, n_prompt=n_prompt)
    assert found is not None
    return found.decode.tokens_per_s


def test_a_slow_device_slows_a_split_but_with_a_small_share(path: Path, planner: Planner) -> None:
    alike = speed(planner, params(path, "cuda:0", "cuda:1"))
    uneven = speed(planner, params(path, "cuda:0", "cuda:2"))
    helped = speed(planner, params(path, "cuda:0", "cuda:2", split=(9.0, 1.0)))
    assert alike > helped > uneven


def test_links_are_as_fast_as_the_ways_that_are_used(path: Path, planner: Planner) -> None:
    """Speed that needs peer access is not promised where that is off."""
    devices, facts = RIG.devices, RIG.facts
    slow = Links({("cuda:0", "cuda:1"): LinkFacts(1e-3, 1e9)})
    forecaster = Forecaster(devices, facts, RIG.links, by_mode={"auto": RIG.links, "off": slow})
    found = {}
    for mode in ("auto", "on", "off"):
        wanted = params(path, p2p=mode)
        forecast = forecaster.forecast(evaluated(planner, wanted), wanted)
        assert forecast is not None
        found[mode] = forecast.decode.tokens_per_s
    assert found["auto"] == found["on"] == speed(planner, params(path))
    assert found["off"] < found["auto"] / 2


def test_layers_take_turns(path: Path, planner: Planner) -> None:
    tensor = speed(planner, params(path))
    layers = speed(planner, params(path, split_mode="layer"))
    alone = speed(planner, params(path, "cuda:0"))
    assert tensor > 1.3 * layers
    assert layers == pytest.approx(alone, rel=0.1)


def test_a_cache_on_the_host_is_read_through_the_slot(path: Path, planner: Planner) -> None:
    here, there = params(path, n_ctx=32768), params(path, n_ctx=32768, kv_on_host=True)
    assert speed(planner, there, 32000) < 0.7 * speed(planner, here, 32000)
    assert speed(planner, there, 1) > 0.9 * speed(planner, here, 1)
    cpu = params(path, "cpu", n_ctx=32768), params(path, "cpu", n_ctx=32768, kv_on_host=True)
    assert speed(planner, cpu[0], 32000) == speed(planner, cpu[1], 32000)


def test_a_prompt_is_as_long_as_the_context_lets_it(path: Path, planner: Planner) -> None:
    def n_tokens(n_ctx: int, n_prompt: int | None) -> int:
        wanted = params(path, n_ctx=n_ctx)
        found = Forecaster.of_rig(RIG).forecast(evaluated(planner, wanted), wanted, "", n_prompt)
        assert found is not None
        return found.prefill.n_tokens

    assert n_tokens(4096, None) == PROMPT_TOKENS
    assert n_tokens(4096, 3000) == 3000
    assert n_tokens(100, 3000) == 99
    assert n_tokens(1, None) == 1


def test_a_device_that_nothing_is_known_of_has_no_forecast(path: Path, planner: Planner) -> None:
    wanted = params(path, "cuda:0", "cuda:7")
    found = Forecaster.of_rig(RIG)
    evaluation = evaluated(planner, wanted)
    assert found.forecast(evaluation, wanted) is None
    found.learn_decode(evaluation, wanted, "", 1.0)
    found.learn_prefill(evaluation, wanted, "", 5, 1.0)


def test_what_was_learnt_corrects_the_same_sort_of_run(path: Path, planner: Planner) -> None:
    learning = Forecaster(RIG.devices, RIG.facts, RIG.links, Calibration())
    wanted = params(path)
    evaluation = evaluated(planner, wanted)
    before = learning.forecast(evaluation, wanted, "Q4_K_M", 100)
    assert before is not None
    learning.learn_decode(evaluation, wanted, "Q4_K_M", 2 * before.decode.seconds, 100)
    after = learning.forecast(evaluation, wanted, "Q4_K_M", 100)
    assert after is not None
    assert after.decode.seconds == pytest.approx(2**0.5 * before.decode.seconds)
    assert after.prefill == before.prefill
    learning.learn_prefill(evaluation, wanted, "Q4_K_M", 100, 3 * before.prefill.seconds)
    third = learning.forecast(evaluation, wanted, "Q4_K_M", 100)
    assert third is not None
    assert third.prefill.seconds == pytest.approx(3**0.5 * before.prefill.seconds)


def test_splits_over_the_same_devices_stay_comparable(path: Path, planner: Planner) -> None:
    """However often one of them was measured: else one that never ran would seem faster."""
    fresh = Forecaster.of_rig(RIG)
    learning = Forecaster(RIG.devices, RIG.facts, RIG.links, Calibration())
    alone = params(path, "cuda:0")

    def decode(forecaster: Forecaster, wanted: LoadParams) -> float:
        found = forecaster.forecast(evaluated(planner, wanted), wanted, "Q4_K_M", 100)
        assert found is not None
        return found.decode.seconds

    for _ in range(3):
        measured = 1.5 * decode(fresh, alone)
        learning.learn_decode(evaluated(planner, alone), alone, "Q4_K_M", measured, 100)
    twice, both = params(path, "cuda:0", "cuda:0"), params(path)
    for wanted in (alone, twice, both, replace(both, split_mode="layer")):
        assert decode(learning, wanted) == pytest.approx(1.5 * decode(fresh, wanted))


def test_what_was_learnt_is_worth_nothing_after_a_new_measurement(
    path: Path, planner: Planner
) -> None:
    known, wanted = Calibration(), params(path, "cuda:0")
    evaluation = evaluated(planner, wanted)
    slower = replace(RIG.facts["cuda:0"], bytes_per_s=RIG.facts["cuda:0"].bytes_per_s / 2)

    def decode(facts: Mapping[str, DeviceFacts], calibration: Calibration | None) -> float:
        found = Forecaster(RIG.devices, facts, RIG.links, calibration).forecast(evaluation, wanted)
        assert found is not None
        return found.decode.seconds

    for _ in range(2):
        learning = Forecaster(RIG.devices, RIG.facts, RIG.links, known)
        learning.learn_decode(evaluation, wanted, "", 0.05)
    assert decode(RIG.facts, known) > 10 * decode(RIG.facts, None)
    measured = {**RIG.facts, "cuda:0": slower}
    assert decode(measured, known) == decode(measured, None)
    assert decode({**measured, "cuda:0": RIG.facts["cuda:0"]}, known) == decode(RIG.facts, known)


@pytest.mark.parametrize(
    ("rig", "decode", "prompts"),
    [
        ("h100", (330, 380), {512: (16e3, 19e3), 2048: (25e3, 28e3)}),
        ("h200", (400, 450), {}),
        ("3090", (135, 150), {512: (2.9e3, 3.2e3), 2048: (2.9e3, 3.2e3)}),
        ("4090", (140, 165), {2048: (6.5e3, 7.5e3)}),
        ("2x3090", (190, 215), {2048: (4.5e3, 5.3e3)}),
    ],
)
def test_an_8b_is_as_fast_as_its_compiled_kernels_can_be(
    rig: str,
    decode: tuple[float, float],
    prompts: Mapping[int, tuple[float, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranges are counted from launches, bytes and registers of Llama 8B Q4_K_M.

    A rig's GPUs have these kernels, whatever is installed here.
    """
    monkeypatch.setattr(backend_choice, "has_triton", lambda: False)
    path, machine = hollow_llama(tmp_path / "8b.gguf", better=2), parse_rig(rig)
    forecaster = Forecaster.of_rig(machine)
    wanted = LoadParams(str(path), tuple(d.id for d in machine.devices if d.kind == "cuda"))
    with closing(Planner(path)) as planner:
        evaluation = planner.evaluate(wanted, forecaster.free_bytes)
    assert evaluation.plan.storage == "kernels"
    for n, (least, most) in {1: (0.0, 1e9), **prompts}.items():
        found = forecaster.forecast(evaluation, wanted, n_prompt=n)
        assert found is not None
        assert least <= found.prefill.tokens_per_s <= most
        if n == 1:
            assert decode[0] <= found.decode.tokens_per_s <= decode[1]


def test_a_rig_has_no_kernels_where_the_reference_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Forecaster.of_rig(RIG)
    assert backend_choice.kernels_for("cuda:0") == "gpu"
    monkeypatch.setenv(backend_choice.VARIABLE, "reference")
    assert backend_choice.kernels_for("cuda:0") == ""
