"""The split panel at its narrowest: nothing is cut off at the right."""

import pytest
from PySide6.QtWidgets import QApplication, QPushButton, QScrollArea, QWidget
from pytestqt.qtbot import QtBot

from app.devices.split.views.split_footer import LoadFooter
from app.devices.split.views.split_panel import MIN_WIDTH
from app.widgets.theme import apply_theme
from engine import DeviceInfo, read_model_info
from tests.helpers.fake_planner import INFO, FakePlanner
from tests.helpers.golden import REPO
from tests.helpers.split_panels import WiredPanel, answered, loaded_as, settle

GIB = 1 << 30
CPU = DeviceInfo("cpu", "cpu", "Intel(R) Xeon(R) Platinum Processor", 32 * GIB, 24 * GIB)
GPUS = [
    DeviceInfo(f"cuda:{i}", "cuda", "NVIDIA GeForce RTX 4090", 24 * GIB, 23 * GIB, uuid=f"GPU-{i}")
    for i in range(3)
]
DEMO = REPO / "resources" / "demo" / "tandem-demo.gguf"


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("mode", ["single", "tensor", "layer", "groups"])
@pytest.mark.parametrize("devices", [[CPU], [*GPUS, CPU]], ids=["cpu", "gpus"])
def test_everything_fits(
    qapp: QApplication, qtbot: QtBot, devices: list[DeviceInfo], mode: str, theme: str
) -> None:
    """It also holds with all details open, and for the buttons below."""
    apply_theme(qapp, theme)
    panel = WiredPanel()
    qtbot.addWidget(panel)
    panel.session.set_devices(devices)
    panel.session.set_model(read_model_info(DEMO))
    panel.session.restore(panel.session.to_dict() | {"mode": mode})
    panel.resize(MIN_WIDTH, 300)  # so low that it scrolls
    panel.show()
    qapp.processEvents()
    for row in panel.rows:
        row.more.setChecked(True)
    qapp.processEvents()
    scroll = panel.findChild(QScrollArea)
    assert scroll.widget().minimumSizeHint().width() <= scroll.viewport().width()
    assert scroll.widget().width() == scroll.viewport().width()
    assert panel.minimumSizeHint().width() <= MIN_WIDTH
    for button in panel.footer.findChildren(QPushButton):
        assert button.isHidden() or button.width() >= button.sizeHint().width()
    apply_theme(qapp, "dark")


def test_a_summary_with_a_measured_speed_fits(qapp: QApplication, qtbot: QtBot) -> None:
    panel = WiredPanel(FakePlanner)
    qtbot.addWidget(panel)
    panel.session.set_devices([CPU])
    panel.session.set_model(INFO)
    panel.session.set_loaded(loaded_as(panel.session.load_params()))
    panel.session._loaded_at -= 60
    panel.resize(MIN_WIDTH, 900)
    panel.show()
    panel.session.note_answer(answered(rate=1234.0))
    settle()
    note = panel.summary.note
    assert panel.summary.measured.isVisible()
    assert panel.minimumSizeHint().width() <= MIN_WIDTH
    assert note.height() >= note.heightForWidth(note.width())


def test_the_footer_takes_two_lines_where_one_is_too_short(
    qapp: QApplication, qtbot: QtBot
) -> None:
    apply_theme(qapp, "dark")
    place = QWidget()  # bounds it, as the dock does
    qtbot.addWidget(place)
    footer, find = LoadFooter(place), QPushButton("Beste suchen…")
    footer.add_button(find)
    footer.undo.setText("Rückgängig")
    footer.load.setText("Live anwenden")
    place.show()
    footer.resize(900, 120)
    qapp.processEvents()
    one_line = footer.sizeHint().width()
    for width, n_lines in ((one_line - 10, 2), (one_line, 1), (one_line - 10, 2)):
        footer.resize(width, 120)
        qapp.processEvents()
        buttons = find, footer.undo, footer.load
        places = [button.mapTo(footer, button.rect().topLeft()).y() for button in buttons]
        assert len(set(places)) == n_lines
        assert all(button.width() >= button.sizeHint().width() for button in buttons)
