"""Context, KV cache type, threads, links, and what is saved of the panel."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QComboBox
from pytestqt.qtbot import QtBot

from app.devices.split.saving import from_dict, to_dict
from app.devices.split.views.load_options import LoadFields, context_stops
from app.widgets.theme import theme
from engine import ModelInfo
from tests.app.conftest import MakePanel
from tests.helpers.fake_planner import CPU, GIB, GPUS, INFO, FakePlanner, fake_machine
from tests.helpers.split_panels import WiredPanel, settle


def test_options_feed_the_load(make_panel: MakePanel) -> None:
    """Context, KV cache type and threads are passed on; threads only where a CPU takes part."""
    panel = make_panel([CPU])
    options = panel.options
    assert options.threads.isVisible()
    assert options.context.value() == 2048
    options.context_slider.setValue(options.context_slider.maximum())
    options.kv_type.setCurrentIndex(options.kv_type.findData("bf16"))
    options.threads.setValue(3)
    settle()
    params = panel.session.load_params()
    assert (params.n_ctx, params.kv_type, params.cpu_threads) == (8192, "bf16", 3)
    assert options.context.value() == 8192
    options.context.setValue(1000)
    options.threads.setValue(0)
    settle()
    assert (panel.session.load_params().n_ctx, panel.session.load_params().cpu_threads) == (
        1000,
        None,
    )


def test_values_have_the_type_of_keys_until_another_is_chosen(make_panel: MakePanel) -> None:
    panel = make_panel([CPU])
    options, values = panel.options, panel.options.rare.type_v

    def choose(box: QComboBox, kind: str) -> str:
        box.setCurrentIndex(box.findData(kind))
        settle()
        return panel.session.load_params().kv_type

    assert values.currentText() == "Same as keys"
    assert choose(options.kv_type, "q8_0") == "q8_0"
    assert choose(values, "q4_0") == "q8_0/q4_0"
    assert choose(options.kv_type, "bf16") == "bf16/q4_0"
    assert choose(values, "") == "bf16"
    assert choose(values, "bf16") == "bf16"
    assert values.currentText() == "Same as keys"


def test_a_type_of_values_is_shown_at_once(make_panel: MakePanel) -> None:
    panel = make_panel([CPU])
    assert not panel.options.rare.type_v.isVisible()
    settings = replace(panel.session.settings, kv_type="q8_0/q4_0")
    assert from_dict(json.loads(json.dumps(to_dict(settings))), [CPU]).kv_type == "q8_0/q4_0"
    panel.options.set_settings(settings, 2048)
    assert panel.options.rare.type_v.isVisible()
    assert panel.options.rare.type_v.currentText() == "Q4_0"
    assert panel.options.kv_type.currentText() == "Q8_0"


def test_batch_and_rope_feed_the_load_and_are_saved(make_panel: MakePanel) -> None:
    panel = make_panel([CPU])
    rare = panel.options.rare
    assert not rare.fields["n_batch"].isVisible()
    rare.head.click()
    assert rare.fields["n_batch"].isVisible()
    assert (rare.fields["n_batch"].text(), rare.fields["rope_factor"].text()) == (
        "auto",
        "As the file says",
    )
    assert rare.fields["checkpoint_bytes"].text() == "auto"
    rare.fields["checkpoint_bytes"].setValue(0)
    rare.fields["parallel"].setValue(4)
    rare.fields["n_batch"].setValue(256)
    rare.fields["fast_prompts"].click()
    rare.rope.setCurrentIndex(rare.rope.findData("yarn"))
    rare.fields["rope_factor"].setValue(4)
    rare.fields["rope_base"].setValue(50_000)
    settle()
    params = panel.session.load_params()
    assert (params.parallel, params.n_batch, params.fast_prompts) == (4, 256, True)
    assert params.rope == "yarn 4.0 50000.0"
    assert params.checkpoint_bytes == 0
    longest = panel.options.context.maximum()
    assert longest == 4 * INFO.n_ctx_train, "the context grows with the factor"
    panel.options.context.setValue(longest)
    settle()
    assert panel.session.load_params().n_ctx == longest
    saved = json.loads(json.dumps(panel.session.to_dict()))
    again = make_panel([CPU])
    again.session.restore(saved)
    settle()
    assert again.session.load_params() == panel.session.load_params()
    assert again.options.rare.head.isChecked(), "what is set is seen"
    again.session.set_model(INFO)
    settle()
    assert again.options.context.maximum() == longest
    again.options.rare.fields["rope_factor"].setValue(0)
    settle()
    assert again.session.load_params().rope_factor == 0


@pytest.mark.parametrize("wrong", [0.5, "4", True, 1e9, None])
def test_damaged_rope_settings_become_the_file_s(make_panel: MakePanel, wrong: object) -> None:
    panel = make_panel([CPU])
    names = ("rope_factor", "rope_base", "rope_scaling", "n_batch", "parallel", "checkpoint_bytes")
    panel.session.restore(panel.session.to_dict() | dict.fromkeys(names, wrong))
    settle()
    found = panel.session.load_params()
    assert (found.rope_factor, found.rope_scaling, found.n_batch) == (0.0, "", None)
    assert (found.parallel, found.checkpoint_bytes) == (1, None)


def test_how_gpus_reach_each_other_is_asked_where_there_are_several(panel: WiredPanel) -> None:
    """The choice is loaded with, saved, and undone like the rest."""
    options = panel.options
    panel.header.mode_button("single").click()
    settle()
    assert not options.p2p.isVisible()
    panel.header.mode_button("tensor").click()
    settle()
    assert options.p2p.isVisible()
    assert panel.session.load_params().p2p == "auto"
    options.p2p.setCurrentIndex(options.p2p.findData("off"))
    settle()
    assert panel.session.load_params().p2p == "off"
    assert panel.session.to_dict()["p2p"] == "off"
    assert "gibberish" in options.p2p.toolTip()
    panel.session.undo()
    settle()
    assert panel.session.load_params().p2p == "auto"
    assert options.p2p.currentData() == "auto"


def test_a_smaller_model_takes_the_context_down(panel: WiredPanel) -> None:
    """A context beyond what it was trained for is never carried over."""
    panel.options.context.setValue(8192)
    small = ModelInfo(INFO.path, "S", "llama", True, 8, 64, 4, 2, 99, 512, 1, GIB, "F16", True, ())
    panel.session.set_model(small)
    assert panel.session.load_params().n_ctx == 512


def test_context_stops_end_with_what_the_model_was_trained_for() -> None:
    """Below it are powers of two; for an unknown length, 32k is the last."""
    assert context_stops(40960) == [512, 1024, 2048, 4096, 8192, 16384, 32768, 40960]
    assert context_stops(256) == [256]
    assert context_stops(0)[-1] == 32768


@pytest.mark.parametrize(
    ("most", "mark", "text"),
    [
        (None, None, ""),
        (8192, None, "The whole context fits."),
        (4096, 0.75, "Up to 4\u202f096 tokens fit."),
        (2896, 0.625, "Up to 2\u202f896 tokens fit."),
        (100, 0.0, "Up to 100 tokens fit."),
        (0, 0.0, "No context fits."),
    ],
)
def test_the_slider_marks_what_fits(
    qtbot: QtBot, most: int | None, mark: float | None, text: str
) -> None:
    """The mark can be between the stops, each of which is twice the one before."""
    options = LoadFields()
    qtbot.addWidget(options)
    options.set_model_context(8192)
    options.set_most(most, 2048)
    found = options.context_slider.mark
    assert found == (None if mark is None else pytest.approx(mark, abs=0.001))
    assert options.context_note.accessibleName() == text
    assert options.context_note.property("role") == (
        "shortage" if most is not None and most < 2048 else "muted"
    )
    assert options.context_slider.accessibleDescription().startswith("2048 tokens.")


def test_beyond_the_mark_the_slider_is_painted_in_the_colour_of_danger(panel: WiredPanel) -> None:
    slider = panel.options.context_slider
    slider.set_most(4096)
    image = slider.grab().toImage()
    middle = image.height() // 2
    assert image.pixelColor(image.width() - 3, middle).name() == theme().danger
    assert image.pixelColor(image.width() * 5 // 8, middle).name() != theme().danger
    slider.set_most(8192)
    assert slider.grab().toImage().pixelColor(image.width() - 3, middle).name() != theme().danger


def test_the_slider_moves_by_keys(panel: WiredPanel) -> None:
    slider = panel.options.context_slider
    before = panel.options.context.value()
    QTest.keyClick(slider, Qt.Key.Key_Right)
    settle()
    assert panel.session.load_params().n_ctx == 2 * before


def test_state_survives_json_and_a_new_panel(panel: WiredPanel, qtbot: QtBot) -> None:
    """Settings can be restored before or after the devices are known."""
    panel.rows[0].number.setValue(55)
    panel.header.mode_button("groups").click()
    panel.rows[2].joined.emit(2, True)
    panel.rows[1].locked.emit(1, True)
    panel.rows[2].moved.emit(2, -1)
    panel.rows[0].reserve_changed.emit(0, 1024)
    panel.options.context.setValue(4096)
    saved = json.loads(json.dumps(panel.session.to_dict()))
    for devices_first in (True, False):
        again = WiredPanel(FakePlanner, fake_machine)
        qtbot.addWidget(again)
        if devices_first:
            again.session.set_devices([*GPUS, CPU])
        again.session.restore(saved)
        again.session.set_devices([*GPUS, CPU])
        again.session.set_model(INFO)
        before, after = panel.session.load_params(), again.session.load_params()
        assert after.split == pytest.approx(before.split)
        assert (after.devices, after.groups) == (before.devices, before.groups)
        assert (after.split_mode, after.n_ctx) == ("groups", 4096)
        assert after.reserve == (("cuda:0", GIB),)
        assert [rank["locked"] for rank in again.session.to_dict()["ranks"]] == [
            False,
            False,
            True,
            False,
        ]
