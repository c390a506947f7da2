"""A chat as PDF: the visible messages, on numbered white pages, from any thread."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pypdfium2 import PdfDocument
from pypdfium2.raw import FPDF_PAGEOBJ_IMAGE
from PySide6.QtWidgets import QApplication

from app.chat.conversation import Conversation
from app.chat.exchange.pdf import free_path, pdf_of, write_all, write_chat_as
from app.chat.export import FORMATS
from app.chat.formulas import MAX_LATEX
from app.chat.images.files import ImageFolder
from app.chat.message import Message
from app.chat.store import ChatStore
from app.widgets.theme import apply_theme

ANSWER = (
    "<think>secret</think>Some *words*, `code` and \\(x^2\\).\n\n# Head\n\n1. first\n   - inner\n\n"
    "> quoted\n\n```python\nx = [1, 2]\ny = 3\n```\n\n| a | b |\n|---|---|\n| 12 | <i>34</i> |\n\n"
    "---\n\n![picture](https://example.org/a.png) [site](https://example.org)"
)


def chat(n_turns: int = 1) -> Conversation:
    made = Conversation(title="Tables <b>", system_prompt="Be brief.")
    for number in range(n_turns):
        made.add(Message("user", f"Question {number}\nwith <i>lines</i>"))
        made.add(Message("assistant", ANSWER))
    return made


def pages(data: bytes) -> list[str]:
    """Return the texts of a PDF's pages."""
    document = PdfDocument(data)
    texts = []
    for page in document:
        text = page.get_textpage()
        texts.append(text.get_text_range())
        text.close()
        page.close()
    document.close()
    return texts


def test_all_that_is_shown_is_on_paper(qapp: QApplication) -> None:
    (text,) = pages(pdf_of(chat()))
    for shown in (
        "Tables <b>", "System prompt", "Be brief.", "Question 0", "with <i>lines</i>", "Some words",
        "Head", "1. first", "• inner", "quoted", "x = [1, 2]", "y = 3", "<i>34</i>", "12",
        "picture (https://example.org/a.png)", "site", "Page 1 of 1",
    ):  # fmt: skip
        assert shown in text, shown
    assert "secret" not in text


def test_pages_are_numbered_and_dark_on_white_in_every_theme(qapp: QApplication) -> None:
    apply_theme(qapp, "dark")
    data = pdf_of(chat(20))
    found = pages(data)
    assert len(found) > 3
    assert [f"Page {n} of {len(found)}" in text for n, text in enumerate(found, 1)] == [True] * len(
        found
    )
    document = PdfDocument(data)
    page = document[0]
    picture = page.render(scale=0.5, grayscale=True)
    grey = bytes(picture.buffer)
    picture.close()
    page.close()
    document.close()
    assert min(grey) < 60, "ink"
    assert sum(value > 235 for value in grey) > 0.8 * len(grey), "paper"


def test_a_thread_can_write_one_without_a_warning(
    qapp: QApplication, qtlog: pytest.LogCaptureFixture
) -> None:
    made: list[bytes] = []
    thread = threading.Thread(target=lambda: made.append(pdf_of(chat(30))))
    thread.start()
    thread.join()
    assert len(pages(made[0])) > 3
    assert not [record.message for record in qtlog.records]


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=80))
def test_any_text_can_be_printed(qapp: QApplication, text: str) -> None:
    made = Conversation.of([Message("user", text), Message("assistant", text)], title=text)
    assert pdf_of(made).startswith(b"%PDF-")


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_form_can_be_written(qapp: QApplication, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"chat{suffix}"
    path.write_text("earlier")
    write_chat_as(chat(), path, ImageFolder(tmp_path))
    data = path.read_bytes()
    assert (b"Question 0" in data) is (suffix != ".pdf")
    assert data.startswith(b"%PDF-") is (suffix == ".pdf")


def test_chats_with_one_title_get_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "Tables b.md").write_text("mine")
    store = ChatStore(tmp_path)
    written = write_all([chat(), chat()], store.read, store.images, tmp_path, ".md")
    assert [path.name for path in written.paths] == ["Tables b (2).md", "Tables b (3).md"]
    assert (tmp_path / "Tables b.md").read_text() == "mine"
    assert free_path(tmp_path, "x", ".md").name == "x.md"


def test_an_export_that_cannot_go_on_says_what_is_there(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    written = write_all([chat(), "gone"], store.read, store.images, tmp_path, ".md")
    assert len(written.paths) == 1
    assert written.failure == "“gone” cannot be written: No such file or directory."


def test_formulas_are_pictures_or_else_their_source(qapp: QApplication) -> None:
    """Each is rendered in the size and colour of its line; one that is too long stays source."""
    long = "x" * (MAX_LATEX + 1)
    answer = f"It is \\(x^2\\), so\n\n$$\\frac{{a}}{{b}}$$\n\nand \\({long}\\)."
    data = pdf_of(Conversation.of([Message("assistant", answer)], title="t"))
    document = PdfDocument(data)
    page = document[0]
    pictures = [part.get_bounds() for part in page.get_objects() if part.type == FPDF_PAGEOBJ_IMAGE]
    page.close()
    document.close()
    text = "".join(pages(data))
    assert "frac" not in text
    assert "x^2" not in text
    assert "xxxxxxxx" in text
    assert len(pictures) == 2
    heights = [top - bottom for _, bottom, _, top in pictures]
    assert 8 < heights[0] < 22, "in points: one line of text"
    assert 20 < heights[1] < 50, "two lines and a bar"
