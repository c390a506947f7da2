"""A flow of widgets that is longer than its area shows the one that was added last."""

from PySide6.QtWidgets import QLabel
from pytestqt.qtbot import QtBot

from app.widgets.layout import FlowArea, FlowBox


def test_the_last_widget_is_shown_once_there_are_more(qtbot: QtBot) -> None:
    box = FlowBox()
    area = FlowArea(box)
    qtbot.addWidget(area)
    area.resize(200, 100)
    area.show()

    def put(n: int) -> None:
        labels = [QLabel("x") for _ in range(n)]
        for label in labels:
            label.setFixedSize(180, 60)
        box.set_widgets(labels)
        area.fit()

    bar = area.verticalScrollBar()
    put(6)
    qtbot.waitUntil(lambda: bar.maximum() > 0 and bar.value() == bar.maximum())
    bar.setValue(0)
    put(6)
    qtbot.wait(50)
    assert bar.value() == 0, "the same widgets, counted anew, move nothing"
    put(7)
    qtbot.waitUntil(lambda: bar.value() == bar.maximum())
