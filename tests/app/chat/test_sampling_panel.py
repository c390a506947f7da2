"""The settings panel: whose values it shows, how they are typed, and that the wheel scrolls it."""

import math

import pytest
from PySide6.QtWidgets import (
    QAbstractSpinBox,
    QApplication,
    QComboBox,
    QDoubleSpinBox,
    QLineEdit,
    QSpinBox,
    QWidget,
)
from pytestqt.qtbot import QtBot

from app.chat.views.sampling_panel import SamplingPanel
from engine import SamplingParams
from tests.helpers.wheel import wheel


@pytest.mark.parametrize("kind", [QComboBox, QAbstractSpinBox])
def test_the_wheel_changes_no_field_even_with_the_focus(
    qtbot: QtBot, qapp: QApplication, kind: type[QWidget]
) -> None:
    panel = SamplingPanel()
    qtbot.addWidget(panel)
    changes: list[object] = []
    panel.sampling_changed.connect(changes.append)
    panel.show()
    panel.activateWindow()
    fields = panel.findChildren(kind)
    assert fields
    for field in fields:
        field.setFocus()
        assert not wheel(field).isAccepted()
    assert changes == []


def test_no_limit_is_said_in_words(qtbot: QtBot) -> None:
    panel = SamplingPanel()
    qtbot.addWidget(panel)
    tokens = panel._rows["max_tokens"].editor
    assert isinstance(tokens, QSpinBox)
    assert tokens.text() == "no limit"
    tokens.setValue(64)
    assert (tokens.text(), panel.params.max_tokens) == ("64", 64)
    panel.reset()
    assert (tokens.text(), panel.params.max_tokens) == ("no limit", -1)


def test_texts_with_line_breaks_and_biases_are_typed_as_words(qtbot: QtBot) -> None:
    panel = SamplingPanel()
    qtbot.addWidget(panel)
    breakers, bias = (panel._rows[name].editor for name in ("dry_breakers", "logit_bias"))
    assert isinstance(breakers, QLineEdit)
    assert isinstance(bias, QLineEdit)
    assert breakers.text() == '\\n;:;";*'
    for text, value in ((r"\n\n;a\\n;\t", ("\n\n", "a\\n", "\t")), ("", ())):
        breakers.setText(text)
        breakers.textEdited.emit(text)
        assert panel.params.dry_breakers == value
        panel.set_params(panel.params)
        assert breakers.text() == text
    bias.textEdited.emit("42=-inf; 7=2.5")
    assert panel.params.logit_bias == ((42, -math.inf), (7, 2.5))
    bias.textEdited.emit("42=-inf; 7=")
    assert panel.params.logit_bias == ((42, -math.inf), (7, 2.5)), "half typed"
    panel.set_params(panel.params)
    assert bias.text() == "42=-inf; 7=2.5"


def test_a_model_s_values_are_defaults_and_what_a_person_set_stays(qtbot: QtBot) -> None:
    panel = SamplingPanel()
    qtbot.addWidget(panel)
    panel.set_params(SamplingParams(temperature=0.6, top_k=7))
    assert panel.chosen == {"temperature": 0.6, "top_k": 7}
    panel.set_default(SamplingParams(temperature=0.6, top_p=0.8))
    assert panel.params == SamplingParams(temperature=0.6, top_k=7, top_p=0.8)
    panel.set_default(SamplingParams())
    assert panel.params == SamplingParams(temperature=0.6, top_k=7), "set by a person, not a file"
    panel.set_default(SamplingParams(min_p=0.2))
    panel.reset()
    assert (panel.params, panel.chosen) == (SamplingParams(min_p=0.2), {})
    number = panel._rows["min_p"].editor
    assert isinstance(number, QDoubleSpinBox)
    number.setValue(0.3)
    assert panel.chosen == {"min_p": 0.3}
    number.setValue(0.2)
    assert panel.chosen == {}
