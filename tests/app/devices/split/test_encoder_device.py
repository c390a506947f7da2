"""The device that encodes pictures is chosen among those that take part, kept, and planned with."""

from __future__ import annotations

from dataclasses import replace

from app.devices.split.figures import (
    FigureInputs,
    SpeedFigures,
    SplitPicture,
    kinds_of,
    row_figures,
)
from app.devices.split.saving import from_dict, to_dict
from app.devices.split.settings import SplitSettings, default_settings
from app.devices.split.views.load_options import EncoderDeviceField
from tests.app.conftest import MakePanel
from tests.helpers.fake_planner import CPU, GIB, GPUS
from tests.helpers.split_panels import settle


def choose(field: EncoderDeviceField, text: str) -> None:
    """Choose an entry of the field as a person does."""
    field.setCurrentIndex(field.findText(text))
    field.activated.emit(field.currentIndex())
    settle()


def offered(field: EncoderDeviceField) -> list[str]:
    """Return the texts of all entries."""
    return [field.itemText(i) for i in range(field.count())]


def test_devices_that_take_part_are_offered_and_the_cpu(make_panel: MakePanel) -> None:
    panel = make_panel([*GPUS, CPU])
    field = panel.options.rare.encoder
    assert offered(field) == ["auto", "GPU 0", "GPU 1", "GPU 2", "CPU"]
    choose(field, "GPU 1")
    assert panel.session.load_params().mmproj_device == "cuda:1"
    panel.session.change(panel.session.settings.with_rank_on(1, False))
    settle()
    assert offered(field) == ["auto", "GPU 0", "GPU 2", "CPU"]
    assert field.currentText() == "auto"
    assert panel.session.load_params().mmproj_device == "auto"
    panel.session.change(panel.session.settings.with_rank_on(1, True))
    settle()
    assert field.currentText() == "GPU 1", "the choice waits for its device"
    choose(field, "CPU")
    assert panel.session.load_params().mmproj_device == "cpu"


def test_it_cannot_be_chosen_for_a_model_that_is_not_to_see(make_panel: MakePanel) -> None:
    panel = make_panel([CPU])
    assert offered(panel.options.rare.encoder) == ["auto", "CPU"]
    panel.session.change(replace(panel.session.settings, mmproj="off"))
    settle()
    assert not panel.options.rare.encoder.isEnabled()


def test_it_is_kept_by_the_name_of_the_device_that_lasts() -> None:
    devices = [*GPUS, CPU]
    settings = replace(default_settings(devices), mmproj_device="cuda:2")
    saved = to_dict(settings)
    assert saved["mmproj_device"] == "GPU-2"
    moved = [replace(GPUS[2], id="cuda:0"), replace(GPUS[0], id="cuda:2"), CPU]
    assert from_dict(saved, moved).mmproj_device == "cuda:0"
    assert from_dict(saved, [CPU]).mmproj_device == "auto"
    for damaged in (7, None, ["cpu"], "cuda:9"):
        assert from_dict({"mmproj_device": damaged}, devices).mmproj_device == "auto"


def test_memory_for_pictures_on_the_cpu_is_shown_beside_gpus() -> None:
    settings: SplitSettings = default_settings([GPUS[0], CPU])
    devices = {device.id: device for device in (GPUS[0], CPU)}
    _, without = row_figures(settings, FigureInputs(devices))
    _, row = row_figures(settings, FigureInputs(devices, apart=GIB))
    assert (without.is_taker, row.is_taker) == (False, True)
    assert row.free == without.free - GIB
    assert ("images", GIB) in kinds_of(row)


def test_nothing_empty_stands_where_a_plan_cannot_be_made(make_panel: MakePanel) -> None:
    panel = make_panel([CPU])
    assert panel.summary.isVisible()
    pictures: list[SplitPicture] = []
    panel.session.pictured.connect(pictures.append)
    panel.session.change(replace(panel.session.settings, n_ctx=512))
    settle()
    sentence = "mmproj.gguf is for another model."
    bare = replace(pictures[-1], plan=None, speed=SpeedFigures(), problems=(sentence,))
    panel.show_picture(bare)
    assert not panel.summary.isVisible()
    assert panel.problem.isVisible()
