"""Words of files and models are text in the window: nothing there reads them as HTML."""

from dataclasses import replace

import pytest
from PySide6.QtCore import Qt, QUrl
from PySide6.QtGui import QAction, QStandardItemModel, QTextDocument, QTextLayout
from PySide6.QtGui import Qt as GuiQt
from PySide6.QtWidgets import QAbstractButton, QLabel, QListWidget, QToolTip, QWidget
from pytestqt.qtbot import QtBot

from app.chat.markdown import CodeBlock
from app.chat.message import Message
from app.chat.views.answer_view import AnswerView
from app.chat.views.code_view import CodeView
from app.chat.views.message_view import UserView
from app.chat.views.prose_view import ProseView
from app.core.notice import Notice
from app.devices.map.grid import grid_of
from app.devices.map.views.placement_table import Look, PlacementTable
from app.devices.split.views.device_row import DeviceRow
from app.main import Shell
from app.widgets.banner import Banner
from app.widgets.text import (
    ElidedLabel,
    LegendLabel,
    PlainLabel,
    Sign,
    caption_text,
    html_text,
    list_item,
    plain_tip,
    row_item,
    unbroken,
)
from engine import EngineError, Fallback, PlacementMap, TemplateError, TensorPlace
from tests.app.conftest import MakePanel
from tests.helpers.acting_texts import ESCAPES, PAGES, acting
from tests.helpers.fake_host import Script, model_info
from tests.helpers.fake_planner import CPU, GPUS
from tests.helpers.shell_driver import MakeShell, ask

TEXTS = (*PAGES, *ESCAPES)
ALL = " ".join(TEXTS)


def assert_plain(label: QLabel) -> None:
    """Check that a label shows its text as it is; that of `LegendLabel` has escaped words."""
    is_legend = isinstance(label, LegendLabel)
    assert label.textFormat() == Qt.TextFormat.PlainText or is_legend, label.text()
    assert not acting(label.text())
    assert "<img" not in label.text() or not is_legend


def tip_as_shown(tip: str) -> str:
    """Return the text that a tool tip shows, and check that it loads nothing."""
    assert not acting(tip)
    if not GuiQt.mightBeRichText(tip):
        return tip
    document = QTextDocument()
    document.setHtml(tip)
    assert "<img" not in document.toHtml()
    return document.toPlainText()


@pytest.mark.parametrize("text", PAGES)
def test_html_is_shown_as_it_is(qtbot: QtBot, text: str) -> None:
    for made in (PlainLabel(text), ElidedLabel(text)):
        qtbot.addWidget(made)
        made.resize(2000, 40)
        assert_plain(made)
        assert made.text() == text
    assert tip_as_shown(plain_tip(text)) == text.strip()
    assert row_item(text).text() == list_item(text).text() == text.strip()
    assert tip_as_shown(row_item("", text).toolTip()) == text.strip()
    assert tip_as_shown(list_item("", text).toolTip()) == text.strip()
    legend = LegendLabel()
    qtbot.addWidget(legend)
    legend.set_signs([Sign("#123456", text, text)], text)
    assert_plain(legend)
    document = QTextDocument()
    document.setHtml(legend.text())
    shown = " ".join(document.toPlainText().split())
    assert shown == " ".join(f"{text} {text} {text}".split())
    document.setHtml(html_text(text))
    assert document.toPlainText() == text.strip()


@pytest.mark.parametrize("text", ESCAPES)
def test_characters_that_act_are_seen(qtbot: QtBot, text: str) -> None:
    for made in (PlainLabel(text), ElidedLabel(text)):
        qtbot.addWidget(made)
        assert_plain(made)
        assert not acting(made.accessibleName())
    tips = [plain_tip(text), row_item("", text).toolTip(), list_item("", text).toolTip()]
    texts = [caption_text(text), html_text(text), row_item(text).text(), list_item(text).text()]
    assert not acting("".join([*tips, *texts]))


def test_names_have_no_keys_or_lines_in_menus() -> None:
    assert caption_text("a&b\tCtrl+Q\nc") == "a&&b Ctrl+Q c"


def test_speeds_are_not_broken_at_their_slash(qtbot: QtBot) -> None:
    def lines(text: str, width: int) -> list[str]:
        """Return a text as it is laid out in a width."""
        layout = QTextLayout(text, QLabel().font())
        layout.beginLayout()
        found = []
        while (line := layout.createLine()).isValid():
            line.setLineWidth(width)
            found.append(text[line.textStart() :][: line.textLength()].strip())
        layout.endLayout()
        return found

    text = "Prompts: 29 650 tok/s. A guess."
    widths = range(60, 200, 2)
    assert any(line.endswith("tok/") for width in widths for line in lines(text, width))
    for width in widths:
        assert sum("650\N{NO-BREAK SPACE}tok" in line for line in lines(unbroken(text), width)) == 1
        assert not any("tok" in line and "s." not in line for line in lines(unbroken(text), width))


def test_a_tool_tip_has_limits() -> None:
    assert len(plain_tip("x" * 10_000_000)) == 2000


@pytest.mark.parametrize("text", TEXTS)
def test_an_error_of_a_template_shows_no_picture(qtbot: QtBot, text: str) -> None:
    message = Message("assistant", "", problem=str(TemplateError(text + "A" * 100_000)))
    view = AnswerView(message)
    qtbot.addWidget(view)
    view.close_answer()
    assert_plain(view._problem)
    assert len(view._problem.text()) <= 500
    assert "AAAA" in view._problem.text()


@pytest.mark.parametrize("text", TEXTS)
def test_a_notice_is_plain(qtbot: QtBot, text: str) -> None:
    banner = Banner()
    qtbot.addWidget(banner)
    banner.show_notice(Notice.of(EngineError(text, text)))
    for made in banner.findChildren(QLabel):
        assert_plain(made)


@pytest.mark.parametrize("text", TEXTS)
def test_chats_and_code_are_text(qtbot: QtBot, text: str) -> None:
    question = UserView(Message("user", text))
    answer = AnswerView(Message("assistant", f"{text}\n\n[{text}](https://x.example)\n"))
    code = CodeView(CodeBlock(text, f"{text}"))
    for view in (question, answer, code):
        qtbot.addWidget(view)
    code.set_code(CodeBlock(f"{text}{text}", text))
    answer.close_answer()
    while answer.make_next():
        pass
    assert answer.findChildren(ProseView)
    assert code.plain_text == f"{text}{text}", "copies are exact"
    assert question.copied_text == text
    for view in (question, answer, code):
        for prose in view.findChildren(ProseView):
            assert not acting(prose.toPlainText().replace("\u2028", ""))
            assert "<img" not in prose.document().toHtml()
        for made in view.findChildren(QLabel):
            assert_plain(made)
    assert not acting(code._text.toPlainText())


@pytest.mark.parametrize(
    "address",
    ["file:///etc/hostname", "https://x.example/p.png", "data:image/png;base64,AAAA", "x.png"],
)
def test_no_text_loads_anything(qtbot: QtBot, address: str) -> None:
    view = ProseView()
    qtbot.addWidget(view)
    for kind in QTextDocument.ResourceType:
        assert bytes(view.loadResource(kind.value, QUrl(address))) == b""  # type: ignore[call-overload]


HOSTILE = f"<img src='file:///etc/hostname'>&Q \u202egpj\x1b[31m {'long ' * 200}"


def texts_of(widget: QWidget) -> list[str]:
    """Check all widgets below one; return the texts and tool tips that they show."""
    texts = []
    for made in (widget, *widget.findChildren(QWidget)):
        texts += [tip_as_shown(made.toolTip()), made.accessibleName(), made.windowTitle()]
        if isinstance(made, QLabel):
            assert_plain(made)
            texts.append(made.text())
        elif isinstance(made, QAbstractButton):
            texts.append(made.text())
        elif isinstance(made, QListWidget):
            items = [made.item(row) for row in range(made.count())]
            texts += [
                text for item in items for text in (item.text(), tip_as_shown(item.toolTip()))
            ]
    for action in widget.findChildren(QAction):
        texts += [action.text(), tip_as_shown(action.toolTip())]
    for model in widget.findChildren(QStandardItemModel):
        for row in range(model.rowCount()):
            items = [model.item(row, column) for column in range(model.columnCount())]
            texts += [t for i in items if i for t in (i.text(), tip_as_shown(i.toolTip()))]
    return texts


def test_no_widget_of_the_window_reads_words_as_anything_else(
    qtbot: QtBot, make_shell: MakeShell, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile model's name, file, warnings, error and answer reach all views that show them."""
    path = f"/models/{HOSTILE.replace('/', '_')[:200]}.gguf"
    info = model_info(path, name=HOSTILE)
    monkeypatch.setattr("tests.helpers.fake_host.model_info", lambda *_, **__: info)
    script.warnings = (HOSTILE,)
    script.fallbacks = (Fallback("kernels", (HOSTILE,), HOSTILE),)
    script.answer = f"```{HOSTILE}\n{HOSTILE}\n```\n{HOSTILE}"
    shell: Shell = make_shell(model=path)
    ask(qtbot, shell, HOSTILE)
    script.answer_error = TemplateError(HOSTILE * 10)
    ask(qtbot, shell, HOSTILE)
    shell.window.model_bar.menu.aboutToShow.emit()
    texts = texts_of(shell.window)
    assert [text for text in texts if acting(text)] == []
    shown = [text for text in texts if "<img src" in text]
    assert len(shown) >= 8, "the words did not get into the window"
    bar = shell.window.model_bar
    assert bar._name.width() <= 430, "a long name is cut"
    (recent,) = (action for action in bar.menu.actions() if "&&Q" in action.text())
    assert len(recent.text()) <= 81
    assert len(shell.window.windowTitle()) < 120
    shell.window.start_view.show_state("", recent=(path,), has_demo=True)
    texts = [made.text() for made in shell.window.start_view.findChildren(QAbstractButton)]
    (name,) = (text for text in texts if "…" in text and not text.endswith("…"))
    assert len(name) < 60


def test_names_of_devices_are_plain_text(make_panel: MakePanel) -> None:
    panel = make_panel([replace(device, name=HOSTILE) for device in (*GPUS, CPU)])
    for row in panel.findChildren(DeviceRow):
        row.more.setChecked(True)
    texts = texts_of(panel)
    assert [text for text in texts if acting(text)] == []
    assert any("<img src" in text for text in texts)


def test_names_of_tensors_are_plain_text(qtbot: QtBot) -> None:
    table = PlacementTable()
    inside = TensorPlace(f"blk.0.{HOSTILE}", 0, HOSTILE, "ffn", "F32", (1,), 4, (4,))
    outside = TensorPlace(HOSTILE, None, HOSTILE, "", HOSTILE, (1,), 4, (4,))
    found = PlacementMap((HOSTILE,), 1, (inside, outside))
    table.set_grid(grid_of(found, ()), Look((0,), (HOSTILE,)))
    shown = []
    for row in range(table.rowCount()):
        for column in range(table.columnCount()):
            at = table.index(row, column)
            shown.append(tip_as_shown(table.data(at, Qt.ItemDataRole.ToolTipRole) or ""))
            shown.append(table.data(at, Qt.ItemDataRole.AccessibleTextRole) or "")
            shown.append(table.headerData(column, Qt.Orientation.Horizontal))
    assert not acting("".join(shown))
    assert len([text for text in shown if "<img src" in text]) >= 5


def test_a_tool_tip_of_html_is_shown_as_text(qtbot: QtBot) -> None:
    """Qt itself is asked, whose rules for what looks like HTML these tests only repeat."""
    parent = QWidget()
    qtbot.addWidget(parent)
    parent.show()
    QToolTip.showText(parent.mapToGlobal(parent.rect().center()), plain_tip(PAGES[0]), parent)
    assert "&lt;img" in QToolTip.text()
    QToolTip.hideText()
