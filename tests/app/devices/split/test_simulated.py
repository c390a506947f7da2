"""Suggested splits, and simulated machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.core.paths import settings_file
from app.devices.split.planning import suggestion
from app.devices.split.session import SplitSession
from app.devices.split.settings import default_settings
from app.devices.split.speed import slot_texts
from app.devices.split.views.split_footer import UNMEASURED
from app.main import Shell
from app.widgets.text import unbroken
from engine import (
    SIMULATED,
    Choice,
    DeviceInfo,
    LoadParams,
    ModelInfo,
    Pcie,
    Topology,
    parse_rig,
    read_model_info,
)
from tests.app.conftest import MakePanel
from tests.helpers.fake_host import FakeHost
from tests.helpers.fake_planner import (
    CPU,
    GIB,
    GPUS,
    INFO,
    FakePlanner,
    RefusingPlanner,
    fake_machine,
)
from tests.helpers.split_panels import WiredPanel, settle
from tests.helpers.tiny_gguf import tiny_gguf

FREE = {"cuda:0": 24 * GIB, "cuda:1": 24 * GIB, "cpu": 24 * GIB}


def suggested(planner: type[FakePlanner], devices: list[DeviceInfo], *free: int) -> Choice | None:
    return suggestion(
        INFO,
        default_settings(devices),
        FREE | {f"cuda:{i}": size * GIB for i, size in enumerate(free)},
        planner(INFO.path),
        lambda: fake_machine(devices).forecaster,
    )


@pytest.mark.parametrize(
    ("free", "devices"),
    [
        ((24, 24), ("cuda:0", "cuda:1")),
        ((24, 1), ("cuda:0",)),
        ((8, 24), ("cuda:0", "cuda:1")),
        ((1, 24), ("cuda:1",)),
        ((1, 1), ("cpu",)),
    ],
)
def test_a_model_goes_where_it_is_fastest_of_what_holds_it(
    free: tuple[int, int], devices: tuple[str, ...]
) -> None:
    """It takes 12.5 GiB, and reads fastest on both GPUs."""
    choice = suggested(FakePlanner, [*GPUS[:2], CPU], *free)
    assert choice is not None
    assert choice.params.devices == devices
    assert "tok/s" in choice.reason


def test_nothing_is_suggested_where_nothing_can_be_planned() -> None:
    assert suggested(RefusingPlanner, GPUS) is None
    assert suggested(FakePlanner, []) is None


def test_a_suggestion_keeps_context_and_cache_type(panel: WiredPanel) -> None:
    """It cannot be undone, since nobody chose the split before."""
    panel.options.context.setValue(4096)
    panel.options.kv_type.setCurrentIndex(panel.options.kv_type.findData("bf16"))
    settle()
    panel.session.suggest(Choice(LoadParams(INFO.path, ("cuda:1",)), "Because."))
    settle()
    params = panel.session.load_params()
    assert (params.devices, params.n_ctx, params.kv_type) == (("cuda:1",), 4096, "bf16")
    assert not panel.footer.undo.isEnabled()


def test_why_a_split_was_chosen_is_shown_until_another_one_is(panel: WiredPanel) -> None:
    """It takes the line that names the limit of a split that the person chose."""
    why = "GPU 1 alone: 61 tok/s. Split over both: 48."
    limit = panel.summary.reason.text()
    assert limit
    panel.session.suggest(Choice(LoadParams(INFO.path, ("cuda:1",)), why))
    settle()
    assert panel.summary.reason.text() == unbroken(why)
    assert panel.summary.reason.toolTip().endswith("of the time.")
    panel.rows[0].switch.click()
    settle()
    assert panel.summary.reason.text() not in ("", why)
    assert not panel.summary.reason.toolTip()
    panel.session.undo()
    settle()
    assert panel.summary.reason.text() == unbroken(why)
    panel.session.set_model(replace(INFO, path=INFO.path))
    settle()
    assert panel.summary.reason.text() == unbroken(why), "the same model"


def test_what_was_chosen_before_any_model_is_not_suggested_away(make_panel: MakePanel) -> None:
    panel = make_panel(info=None)
    assert panel.session.suggester()(INFO) is not None
    panel.rows[2].switch.click()
    assert panel.session.suggester()(INFO) is None
    panel.session.set_model(INFO)
    assert panel.session.suggester()(INFO) is not None


def test_a_machine_that_was_not_measured_says_so(qapp: QApplication, qtbot: QtBot) -> None:
    """The text also says where to measure."""
    panel = WiredPanel(
        FakePlanner, lambda devices: replace(fake_machine(devices), measured=frozenset())
    )
    qtbot.addWidget(panel)
    panel.session.set_devices(GPUS)
    panel.session.set_model(INFO)
    panel.show()
    settle()
    assert UNMEASURED in panel.summary.note.text()
    panel.session.stop()


@pytest.fixture
def simulated(qtbot: QtBot, qapp: QApplication, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    shell = Shell(qapp, lambda on_event: FakeHost(on_event), parse_rig("2x3090,1x3060"))
    shell.start()
    yield shell
    shell.window.close()
    shell.window.deleteLater()
    shell.deleteLater()


def test_a_window_plans_for_a_machine_that_is_not_here(
    qtbot: QtBot, simulated: Shell, tmp_path: Path
) -> None:
    """It has the simulated devices and speeds; a load is refused with a sentence."""
    path = tiny_gguf(tmp_path / "tiny.gguf", n_layer=2, n_head_kv=4, n_ff=256)
    simulated.models.open(str(path))
    qtbot.waitUntil(lambda: simulated.window.banner.notice is not None)
    notice = simulated.window.banner.notice
    assert notice is not None
    assert notice.text == SIMULATED
    split = simulated.split_panel
    assert [row.name.accessibleName() for row in split.rows][:3] == [
        "RTX 3090", "RTX 3090", "RTX 3060",
    ]  # fmt: skip
    assert split.rows[0].sensors.text() == "PCIe 4 ×16"
    assert simulated.split.load_params().devices == ("cuda:0",)
    qtbot.waitUntil(lambda: "Simulated" in split.summary.note.text())
    assert "Parallel requests: 1\u00a0×" in split.summary.note.text()
    split.options.rare.fields["parallel"].setValue(16)
    qtbot.waitUntil(lambda: "Parallel requests: 16\u00a0×" in split.summary.note.text())
    assert split.summary.predicted.text().endswith("tok/s")
    assert not simulated.poller.is_running


def test_a_slot_that_the_driver_does_not_tell_is_left_out() -> None:
    """The highest generation counts, as idle slots are slower; the width is the present one."""
    pcie = {"cuda:0": Pcie(1, 8, 4, 16), "cuda:1": Pcie(3, 0, 0, 4), "cuda:2": Pcie()}
    assert slot_texts(Topology(pcie, ())) == {"cuda:0": "PCIe 4 ×8", "cuda:1": "PCIe 3 ×4"}


def test_what_a_person_chose_is_not_suggested_away(
    qtbot: QtBot, simulated: Shell, tmp_path: Path
) -> None:
    """It is still there the next time the file is opened."""
    path = str(tiny_gguf(tmp_path / "tiny.gguf", n_layer=2, n_head_kv=4, n_ff=256))
    info: ModelInfo = read_model_info(path)
    simulated.models.open(path)
    qtbot.waitUntil(lambda: simulated.models.info == info)
    simulated.split_panel.header.mode_button("layer").click()
    simulated.split_panel.rows[2].switch.click()
    wanted = simulated.split.load_params()
    simulated.models.open(path)
    with qtbot.waitSignal(simulated.models.suggested):
        pass
    assert simulated.split.load_params() == wanted


def test_splits_over_imaginary_devices_are_not_saved(
    qtbot: QtBot, qapp: QApplication, tmp_path: Path
) -> None:
    """The split of the real machine stays in the file; other settings are saved as always."""
    path = str(tiny_gguf(tmp_path / "tiny.gguf", n_layer=2, n_head_kv=4, n_ff=256))
    real = {path: {"mode": "layer"}}
    settings_file().parent.mkdir(parents=True, exist_ok=True)
    settings_file().write_text(json.dumps({"plans": real}))
    shell = Shell(qapp, lambda on_event: FakeHost(on_event), parse_rig("2x3090,1x3060"))
    shell.start()
    shell.models.open(path)
    qtbot.waitUntil(lambda: shell.models.info is not None)
    shell.split_panel.header.mode_button("tensor").click()
    shell.keep(replace(shell.settings.current, theme="light"))
    assert shell.settings.current.plans != real
    shell.window.close()
    saved = json.loads(settings_file().read_text())
    assert (saved["plans"], saved["theme"]) == (real, "light")
    shell.window.deleteLater()
    shell.deleteLater()


def test_a_selected_model_is_not_read_and_planned_anew_on_the_windows_thread() -> None:
    """The thread that reads its header has done so; else a large vocabulary stops the window."""
    opened: list[str] = []

    class Counting(FakePlanner):
        def __init__(self, path: str) -> None:
            super().__init__(path)
            opened.append(path)

    split = SplitSession(Counting, fake_machine)
    split.set_devices([*GPUS[:2], CPU])
    choice = split.suggester()(INFO)
    assert choice is not None
    assert opened == [INFO.path]
    split.set_model(INFO)
    assert opened == [INFO.path]
    split.set_model(INFO)
    assert opened == [INFO.path] * 2, "what was prepared is used once"
