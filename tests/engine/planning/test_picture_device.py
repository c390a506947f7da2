"""Where the encoder of pictures lies: the best device with room, or the one that was chosen."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import AnswerRequest, EngineError, LoadParams, Planner, SamplingParams, load_model
from engine.planning.plan import Plan
from tests.helpers.answers import ids_of
from tests.helpers.hf_models.seeing import SEEING
from tests.helpers.pictures import random_picture, shown

PLENTY = 1 << 40
BOTH = ("cuda:0", "cuda:1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("gemma3")
    SEEING[0].build(found)
    return found


@pytest.fixture(scope="module")
def planner(folder: Path) -> Iterator[Planner]:
    made = Planner(folder / "model.gguf")
    yield made
    made.close()


def planned(
    planner: Planner, devices: tuple[str, ...], free: dict[str, int] | None = None, **options: Any
) -> Plan:
    params = LoadParams(planner.info.path, devices, **options)
    return planner.plan(params, dict.fromkeys((*devices, "cpu"), PLENTY) | (free or {}))


def bytes_for_pictures(plan: Plan) -> dict[str, int]:
    """Return the bytes of the encoder by device."""
    found = {d.device: d.memory.pictures for d in plan.devices if d.memory.pictures}
    return found | ({"cpu": plan.pictures_apart} if plan.pictures_apart else {})


@pytest.mark.parametrize(
    ("devices", "options", "expected"),
    [
        (("cuda:0", "cuda:1"), {"split": (1, 3)}, "cuda:1"),
        (("cpu", "cuda:0"), {"split": (3, 1)}, "cuda:0"),  # a GPU before the largest share
        (("cpu", "cpu"), {}, "cpu"),
        (BOTH, {"mmproj_device": "cuda:0", "split": (1, 3)}, "cuda:0"),
        (BOTH, {"mmproj_device": "cpu"}, "cpu"),  # though no rank is there
    ],
)
def test_pictures_go_to_the_best_device_or_the_chosen_one(
    planner: Planner, devices: tuple[str, ...], options: dict[str, Any], expected: str
) -> None:
    plan = planned(planner, devices, **options)
    assert plan.pictures_device == expected
    assert list(bytes_for_pictures(plan)) == [expected]
    blind = planned(planner, devices, **options | {"mmproj": "off", "mmproj_device": "auto"})
    assert blind.pictures_device == ""
    assert plan.total_bytes - blind.total_bytes == sum(bytes_for_pictures(plan).values())


def test_a_full_device_leaves_pictures_to_the_next(planner: Planner) -> None:
    blind = planned(planner, BOTH, split=(1, 3), mmproj="off").bytes_by_device()
    full = {"cuda:1": blind["cuda:1"] + 1000}
    plan = planned(planner, BOTH, full, split=(1, 3))
    assert plan.pictures_device == "cuda:0"
    assert not plan.shortages(full)
    full["cuda:0"] = blind["cuda:0"] + 1000
    plan = planned(planner, BOTH, full, split=(1, 3))
    assert plan.pictures_device == "cpu"
    assert not plan.shortages(full | {"cpu": PLENTY})


def test_a_chosen_device_without_room_is_told_before_loading(planner: Planner) -> None:
    blind = planned(planner, BOTH, mmproj="off").bytes_by_device()
    full = {"cuda:1": blind["cuda:1"] + 1000}
    plan = planned(planner, BOTH, full, mmproj_device="cuda:1")
    with pytest.raises(EngineError, match="needed to load the model and see images") as told:
        plan.check_fits(full)
    assert "--mmproj-device cpu" in told.value.hint


def test_other_devices_are_refused(folder: Path) -> None:
    with pytest.raises(EngineError, match="'mmproj_device' must be 'auto', 'cuda:0' or 'cpu'"):
        LoadParams(str(folder / "model.gguf"), ("cuda:0",), mmproj_device="cuda:7")


def test_an_encoder_stays_where_it_is_and_moves_where_it_must(folder: Path) -> None:
    asked = AnswerRequest(
        messages=(shown("hello", random_picture(40, 40)),),
        sampling=SamplingParams(max_tokens=2, ignore_eos=True),
    )
    with load_model(folder / "model.gguf", ["cpu"] * 2, [1, 3], mmproj_device="cpu") as model:
        first = model._images.encoder
        assert model.runtime.plan.pictures_device == "cpu"
        assert model.memory()[1].measured.pictures
        model.resplit([1, 1], devices=["cpu", "cpu"])
        assert model._images.encoder is first
        assert model._images.encoder.n_encoded == 0
        assert len(ids_of(model.answer(asked))) == 2
        assert model._images.encoder.n_encoded == 1
