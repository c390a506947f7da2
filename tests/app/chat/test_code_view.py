"""The height of a code block: all lines are visible, whatever characters they have."""

from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication, QFileDialog
from pytestqt.qtbot import QtBot

from app.chat.markdown import CodeBlock
from app.chat.views.code_view import CodeView

LINES = [f"x{number} = {number}" for number in range(40)]


def is_whole(view: CodeView) -> bool:
    """Return whether the last line of a view is inside the painted area."""
    text = view._text
    block = text.document().lastBlock()
    area = text.blockBoundingGeometry(block).translated(text.contentOffset())
    return area.bottom() <= text.viewport().height()


@pytest.mark.parametrize("more", ["", "\n# 漢字 🙂 ⌘ नमस्ते\n" * 20], ids=["latin", "others"])
@pytest.mark.parametrize("grows", [False, True], ids=["at once", "growing"])
def test_the_last_line_is_seen(qtbot: QtBot, qapp: QApplication, more: str, grows: bool) -> None:
    text = "\n".join(LINES) + more
    view = CodeView(CodeBlock("" if grows else text, "python"))
    qtbot.addWidget(view)
    view.resize(500, 100)
    view.show()
    for end in range(7, len(text) + 7, 7) if grows else ():
        view.set_code(CodeBlock(text[:end], "python"))
    qapp.processEvents()
    assert is_whole(view)
    assert view._text.height() < 1.5 * view._text.document().lineCount() * 16 + 20


def test_a_wide_block_is_whole_above_its_scroll_bar(qtbot: QtBot, qapp: QApplication) -> None:
    view = CodeView(CodeBlock("\n".join([*LINES, "y" * 400]), "python"))
    qtbot.addWidget(view)
    view.resize(300, 100)
    view.show()
    qapp.processEvents()
    assert view._text.horizontalScrollBar().isVisible()
    assert is_whole(view)


def test_a_text_that_is_replaced_by_a_shorter_one_shrinks(qtbot: QtBot, qapp: QApplication) -> None:
    view = CodeView(CodeBlock("\n".join(LINES), "python"))
    qtbot.addWidget(view)
    high = view._text.height()
    view.set_code(CodeBlock("a = 1\nb = 2", "python"))
    assert view._text.height() < high / 4


@pytest.mark.parametrize(
    ("language", "suffix"),
    [
        ("python", ".py"),
        ("C++", ".cpp"),
        ("rust", ".rs"),
        ("sh", ".sh"),
        ("", ".txt"),
        ("x/..", ".txt"),
    ],
)
def test_code_is_saved_with_the_suffix_of_its_language(
    qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, language: str, suffix: str
) -> None:
    view = CodeView(CodeBlock("x = 'é\udc80'", language))
    qtbot.addWidget(view)
    offered: list[str] = []

    def choose(parent: object, title: str, place: str, kinds: str) -> tuple[str, str]:
        offered.append(Path(place).name)
        return str(tmp_path / offered[0]), ""

    monkeypatch.setattr(QFileDialog, "getSaveFileName", choose)
    view.save()
    assert offered == [f"code{suffix}"]
    assert (tmp_path / f"code{suffix}").read_text(encoding="utf-8") == "x = 'é?'\n"
    assert view._save.text() == "Saved"
    view._copied.stop()


def test_a_failure_to_save_is_said(qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> None:
    view = CodeView(CodeBlock("x", "python"))
    qtbot.addWidget(view)
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_: ("/no/such/folder/x.py", ""))
    view.save()
    assert view._problem.text().startswith("Not saved: No such file")


def test_wrapped_code_is_whole_and_does_not_scroll(qtbot: QtBot, qapp: QApplication) -> None:
    view = CodeView(CodeBlock("\n".join([*LINES, "word " * 100]), "text"))
    qtbot.addWidget(view)
    view.resize(300, 100)
    view.show()
    view._wrap.setChecked(True)
    qapp.processEvents()
    assert view._text.horizontalScrollBar().maximum() == 0
    assert is_whole(view)
    before = view._text.height()
    view.resize(600, 100)
    qapp.processEvents()
    assert view._text.height() < before
    assert is_whole(view)
    view._wrap.setChecked(False)
    qapp.processEvents()
    assert view._text.horizontalScrollBar().maximum() > 0
