"""The sampling panel: scope of its values, typing, and scrolling by wheel."""

import math
from dataclasses import fields

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import (
    QAbstractButton,
    QAbstractSpinBox,
    QApplication,
    QComboBox,
    QDoubleSpinBox,
    QLabel,
    QLineEdit,
    QPlainTextEdit,
    QSpinBox,
    QWidget,
)
from pytestqt.qtbot import QtBot

from app.chat.sampling.panel import SamplingPanel
from app.chat.sampling.text_editors import OrderEditor
from engine import SAMPLERS, SamplingParams
from tests.helpers.wheel import wheel


@pytest.mark.parametrize("kind", [QComboBox, QAbstractSpinBox])
def test_the_wheel_changes_no_field_even_with_the_focus(
    qtbot: QtBot, qapp: QApplication, kind: type[QWidget]
) -> None:
    panel = SamplingPanel()
    qtbot.addWidget(panel)
    changes: list[object] = []
    panel.chosen_changed.connect(changes.append)
    panel.show()
    panel.activateWindow()
    for group in panel._groups:
        group.head.setChecked(True)
    fields = panel.findChildren(kind)
    assert fields
    for field in fields:
        field.setFocus()
        assert not wheel(field).isAccepted()
    assert changes == []


def test_no_limit_is_said_in_words(qtbot: QtBot) -> None:
    panel = SamplingPanel()
    qtbot.addWidget(panel)
    tokens = panel.rows["max_tokens"].editor
    assert isinstance(tokens, QSpinBox)
    assert tokens.text() == "no limit"
    tokens.setValue(64)
    assert (tokens.text(), panel.params.max_tokens) == ("64", 64)
    panel.reset()
    assert (tokens.text(), panel.params.max_tokens) == ("no limit", -1)


def test_texts_with_line_breaks_and_biases_are_typed_as_words(qtbot: QtBot) -> None:
    panel = SamplingPanel()
    qtbot.addWidget(panel)
    breakers, bias = (panel.rows[name].editor for name in ("dry_breakers", "logit_bias"))
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
    assert panel.params.logit_bias == ((42, -math.inf), (7, 2.5)), "still being typed"
    panel.set_params(panel.params)
    assert bias.text() == "42=-inf; 7=2.5"


def test_a_model_s_values_are_defaults_and_what_a_person_set_stays(qtbot: QtBot) -> None:
    panel = SamplingPanel()
    qtbot.addWidget(panel)
    panel.set_params(SamplingParams(temperature=0.6, top_k=7))
    assert panel.chosen == {"temperature": 0.6, "top_k": 7}
    panel.show_values(panel.chosen, SamplingParams(temperature=0.6, top_p=0.8))
    assert panel.params == SamplingParams(temperature=0.6, top_k=7, top_p=0.8)
    panel.show_values(panel.chosen, SamplingParams(min_p=0.2))
    assert panel.params == SamplingParams(temperature=0.6, top_k=7, min_p=0.2), "set by the user"
    panel.reset()
    assert (panel.params, panel.chosen) == (SamplingParams(min_p=0.2), {})
    row = panel.rows["min_p"]
    assert isinstance(row.editor, QDoubleSpinBox)
    row.editor.setValue(0.3)
    assert panel.chosen == {"min_p": 0.3}
    assert row.label.text() == "● Min-p"
    row.editor.setValue(0.2)
    assert panel.chosen == {}
    assert row.label.text() == "Min-p"


def test_every_field_has_an_editor_a_tip_and_a_way_back(qtbot: QtBot) -> None:
    panel = SamplingPanel()
    qtbot.addWidget(panel)
    others = {
        "samplers": SAMPLERS[::-1], "seed": 7, "logit_bias": ((3, -1.0),), "mirostat": True,
        "ignore_eos": True, "on_overflow": "shift", "stop": ("a",), "banned_strings": ("b c", "d"),
        "dry_breakers": ("\n",), "json_schema": '{\n"type": "null"}', "grammar": 'start: "a"',
        "regex": "a+",
    }  # fmt: skip
    for spec in fields(SamplingParams):
        row, name = panel.rows[spec.name], spec.name
        assert row.editor.toolTip().strip("<p>"), name
        assert row.editor.accessibleName(), name
        assert row.label.buddy() is row.editor
        meta = spec.metadata
        largest = min(meta.get("max", 0), 1000)
        value = others.get(name, meta.get("min") if largest == spec.default else largest)
        panel.show_values({name: value}, SamplingParams())
        assert getattr(panel.params, name) == value
        assert not row.reset.isHidden()
        assert panel.chosen == {name: value}
        row.reset.click()
        assert panel.params == SamplingParams(), name
        assert row.reset.isHidden()
    assert {name for group in panel._groups for name in group.rows} == set(panel.rows)


def test_banned_strings_are_typed_one_per_line(qtbot: QtBot) -> None:
    panel = SamplingPanel()
    qtbot.addWidget(panel)
    edit = panel.rows["banned_strings"].editor
    assert isinstance(edit, QPlainTextEdit)
    qtbot.keyClicks(edit, "a testament to; really")
    qtbot.keyClick(edit, Qt.Key.Key_Return)
    qtbot.keyClicks(edit, "\\n\\n")
    assert panel.params.banned_strings == ("a testament to; really", "\n\n")
    assert edit.toPlainText() == "a testament to; really\n\\n\\n", "typed text stays"


def test_the_order_changes_by_keys_by_buttons_and_by_dragging(qtbot: QtBot) -> None:
    editor = OrderEditor()
    qtbot.addWidget(editor)
    orders: list[tuple[str, ...]] = []
    editor.changed.connect(orders.append)
    editor.show()
    editor._list.setCurrentRow(1)
    qtbot.keyClick(editor._list, Qt.Key.Key_Up, Qt.KeyboardModifier.AltModifier)
    assert orders[-1] == ("dry", "penalties", *SAMPLERS[2:])
    assert editor._list.currentRow() == 0, "the moved sampler stays selected"
    assert not editor.up.isEnabled()
    editor.down.click()
    assert orders[-1] == SAMPLERS
    n = editor._list.count()
    model, root = editor._list.model(), editor._list.rootIndex()
    assert model.moveRow(root, n - 1, root, 0), "as the list does when a sampler is dropped"
    assert orders[-1] == ("temperature", *SAMPLERS[:-1])
    editor._list.setCurrentRow(1)
    qtbot.keyClick(editor._list, Qt.Key.Key_Space)
    assert orders[-1] == ("temperature", *SAMPLERS[1:-1]), "a sampler can be disabled"
    n_reports = len(orders)
    editor.show_steps(("top_k", "temperature"))
    assert editor.steps == ("top_k", "temperature")
    assert len(orders) == n_reports, "showing values is not a change"
    assert n == editor._list.count() == len(SAMPLERS)


def test_nothing_is_cut_off_in_a_dock_of_360_pixels(qtbot: QtBot) -> None:
    panel = SamplingPanel()
    qtbot.addWidget(panel)
    panel.show_values({"temperature": 0.1, "samplers": SAMPLERS[1:]}, SamplingParams())
    panel.set_scope(is_own=True)
    panel.presets.set_presets((), "A preset with quite a long name", is_own=True)
    panel.set_host_note("Sampled on the host: Order.", ("samplers",))
    panel.resize(360, 2400)
    panel.show()
    for group in panel._groups:
        group.head.setChecked(True)
    qtbot.waitUntil(lambda: panel.widget().width() <= 360)
    for widget in panel.widget().findChildren(QWidget):
        if isinstance(widget, QLabel | QAbstractButton) and widget.isVisible():
            right = widget.mapTo(panel, widget.rect().topRight()).x()
            assert right < 360, widget.text()
            if isinstance(widget, QLabel) and widget.wordWrap():
                assert widget.height() >= widget.heightForWidth(widget.width()), widget.text()
            elif widget.text():
                assert widget.width() >= widget.minimumSizeHint().width(), widget.text()
