"""The banner of notices."""

from PySide6.QtWidgets import QApplication, QLabel, QPushButton, QVBoxLayout, QWidget
from pytestqt.qtbot import QtBot

from app.core.notice import Notice
from app.widgets.banner import NARROW, Banner
from app.widgets.theme import apply_theme

ERROR = Notice("The model needs 9.3 GiB.", "Close other programs.", "error", "Load again", print)


def test_a_narrow_banner_has_its_button_under_the_text(qtbot: QtBot) -> None:
    banner = Banner()
    qtbot.addWidget(banner)
    banner.show_notice(ERROR)
    assert banner.property("kind") == "error"
    button = next(one for one in banner.findChildren(QPushButton) if one.text() == "Load again")
    for width, is_below in ((NARROW - 1, True), (2 * NARROW, False)):
        banner.resize(width, banner.heightForWidth(width))
        qtbot.waitUntil(lambda is_below=is_below: is_below == (button.y() > _end(banner)))


def _end(banner: Banner) -> int:
    return banner._hint.geometry().bottom()


def test_all_lines_of_a_narrow_banner_have_room(qtbot: QtBot, qapp: QApplication) -> None:
    """A layout that is too low would squeeze them into each other; the style comes last."""
    apply_theme(qapp, "dark")
    around = QWidget()
    qtbot.addWidget(around)
    column, banner, other = QVBoxLayout(around), Banner(), QWidget()
    other.setMinimumHeight(120)
    column.addWidget(other, 1)
    column.addWidget(banner)
    around.resize(300, 100)
    around.show()
    banner.show_notice(Notice("Some words of a text. " * 4, "Words of a hint. " * 5, action="Do"))
    QApplication.processEvents()
    texts = [part for part in banner.findChildren(QLabel) if part.text()]
    assert len(texts) == 2
    for part in texts:
        qtbot.waitUntil(lambda part=part: part.height() >= part.heightForWidth(part.width()))
