"""A growing answer on screen."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PySide6.QtCore import QByteArray, QUrl
from PySide6.QtGui import QDesktopServices, QTextDocument
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.chat.markdown import CodeBlock
from app.chat.views.code_view import CodeView
from app.chat.views.message_body import MessageBody
from app.chat.views.prose_view import ProseView, open_link
from app.chat.views.table_view import TableView

TEXT = """# Title

First *paragraph* with `code`.

```python
def f(x):
    return "<b>" + x
```

- one
- two

| a | b |
|---|---|
| 1 | 2 |

> quote

last"""


@pytest.fixture
def body(qtbot: QtBot) -> Iterator[MessageBody]:
    made = MessageBody()
    qtbot.addWidget(made)
    yield made
    made._timer.stop()


def whole(qtbot: QtBot, text: str) -> list[str]:
    made = MessageBody()
    qtbot.addWidget(made)
    made.set_text(text)
    return made.pieces_shown()


def test_prose_and_code_alternate(body: MessageBody) -> None:
    body.set_text(TEXT)
    kinds = [type(view) for view in body._views]
    assert kinds == [ProseView, CodeView, ProseView, TableView, ProseView]
    assert body.pieces_shown()[1] == 'def f(x):\n    return "<b>" + x'
    assert "• one" in body.pieces_shown()[2]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(0, len(TEXT)), max_size=20))
def test_growing_ends_in_the_same_picture_as_showing_at_once(qtbot: QtBot, cuts: list[int]) -> None:
    growing = MessageBody()
    qtbot.addWidget(growing)
    start = 0
    for cut in [*sorted(cuts), len(TEXT)]:
        growing.append(TEXT[start:cut])
        growing.flush()
        start = cut
    assert growing.pieces_shown() == whole(qtbot, TEXT)
    heights = [view.sizeHint().height() for view in growing._views if isinstance(view, ProseView)]
    assert all(heights)


def test_what_is_complete_is_never_written_again(
    body: MessageBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new word costs the same after many paragraphs as after one."""
    body.set_text("paragraph\n\n" * 50 + "tail")
    written: list[object] = []
    monkeypatch.setattr(ProseView, "write", lambda view, pieces: written.extend(pieces))
    body.append(" grows")
    body.flush()
    assert written == []
    assert body.pieces_shown()[0].endswith("tail grows")


def test_a_line_that_becomes_something_else_is_rewritten_in_its_view(body: MessageBody) -> None:
    """A closing delimiter turns earlier words bold; a list item may begin as a paragraph."""
    body.set_text("some **bo")
    view = body._views[0]
    for text in ("ld** words", "\n\n*", " item", "\n# H"):
        body.append(text)
        body.flush()
    assert body._views == [view]
    assert body.pieces_shown() == ["some bold words\n• item\nH"]


def test_growing_code_keeps_its_view_and_its_colours(qtbot: QtBot, body: MessageBody) -> None:
    body.set_text("```python\nx = 1")
    view = body._views[0]
    body.append("\ndef f(): pass")
    body.flush()
    assert body._views == [view]
    assert isinstance(view, CodeView)
    assert view.plain_text == "x = 1\ndef f(): pass"
    line = view._text.document().findBlockByNumber(1)
    qtbot.waitUntil(lambda: bool(line.layout().formats()))


def test_the_copy_button_of_a_code_block_copies_its_text(
    qtbot: QtBot, body: MessageBody, qapp: QApplication
) -> None:
    body.set_text("```sh\nls -l\n```")
    view = body._views[0]
    assert isinstance(view, CodeView)
    view.copy()
    assert qapp.clipboard().text() == "ls -l"
    assert view._copy.text() == "Copied"


@pytest.mark.parametrize("language", ["", "no-such-language", "PYTHON", "c++", "../x"])
def test_any_language_name_is_fine(qtbot: QtBot, language: str) -> None:
    view = CodeView(CodeBlock("x = 1\n\n\ty", language))
    qtbot.addWidget(view)
    assert view.plain_text == "x = 1\n\n\ty"


def test_nothing_is_fetched_for_a_text(body: MessageBody) -> None:
    body.set_text("![x](http://127.0.0.1:9/x.png) and ![y](/etc/passwd)")
    view = body._views[0]
    assert isinstance(view, ProseView)
    kind = QTextDocument.ResourceType.ImageResource
    for address in ("file:///etc/passwd", "/etc/passwd", "data:text/plain,x"):
        assert view.document().resource(kind.value, QUrl(address)) == QByteArray()


def test_only_web_addresses_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(QDesktopServices, "openUrl", lambda url: opened.append(url.toString()))
    for address in ("https://a.b/c", "http://a.b", "file:///etc/passwd", "javascript:x", "app:y"):
        open_link(QUrl(address))
    assert opened == ["https://a.b/c", "http://a.b"]
