"""Files in the window: attached, counted, cut, sent, stored, refused."""

import sys
from pathlib import Path

import pytest
from PySide6.QtCore import QMimeData, QPointF, Qt, QUrl
from PySide6.QtGui import QDropEvent
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.chat.attachments import documents, files
from app.chat.export import exported
from app.chat.views.chips import DraftChip, FileChip
from app.chat.views.message_view import UserView
from app.main import Shell
from tests.helpers.pdf import pdf
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner, prompts, shown
from tests.helpers.tiny_gguf import tiny_gguf


def chips(shell: Shell) -> list[DraftChip]:
    return list(shell.chat_presenter.files.chips._widgets)  # type: ignore[arg-type]


def drop(shell: Shell, *paths: Path) -> bool:
    """Drop files on the composer; return whether it accepts them."""
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(path)) for path in paths])
    keys, buttons = Qt.KeyboardModifier.NoModifier, Qt.MouseButton.LeftButton
    actions = Qt.DropAction.CopyAction | Qt.DropAction.MoveAction
    event = QDropEvent(QPointF(9, 9), actions, data, buttons, keys)
    event.ignore()
    shell.window.composer.dropEvent(event)
    assert not event.isAccepted() or event.dropAction() == Qt.DropAction.CopyAction
    return event.isAccepted()


def wait_until_read(qtbot: QtBot, shell: Shell) -> None:
    files = shell.chat_presenter.files
    qtbot.waitUntil(lambda: all(file.file for file in files.files), timeout=20_000)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text("The secret word is whale.\n")
    return path


def test_dropped_files_go_with_the_message_and_stay(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path, notes: Path
) -> None:
    paper = tmp_path / "paper.pdf"
    paper.write_bytes(pdf("Page one", "Page two"))
    model = tiny_gguf(tmp_path / "m.gguf")
    shell = make_shell(model=str(model))
    assert drop(shell, notes, paper)
    wait_until_read(qtbot, shell)
    first, second = chips(shell)
    assert first.name.text() == "notes.txt"
    assert first.more.accessibleName().startswith("26 B · ")
    assert first.more.accessibleName().endswith(" tokens")
    assert second.name.text() == "paper.pdf"
    ask(qtbot, shell, "What is the word?")
    assert chips(shell) == []
    sent = prompts(shell)[-1][-1][1]
    assert sent == (
        '<file name="notes.txt">\nThe secret word is whale.\n</file>\n\n'
        '<file name="paper.pdf">\nPage one\n\nPage two\n</file>\n\nWhat is the word?'
    )
    assert shown(shell)[0] == "What is the word?", "the bubble does not show the text of the files"
    shell.window.close()
    notes.unlink()

    again = make_shell(model=str(model))
    (view,) = (v for v in again.window.chat_view.shown if isinstance(v, UserView))
    assert [chip.name.text() for chip in view.findChildren(FileChip)] == ["notes.txt", "paper.pdf"]
    again.session.regenerate()
    qtbot.waitUntil(lambda: not again.session.is_busy)
    assert prompts(again)[-1][-1][1] == sent
    again.chat_presenter.edit(again.session.current.messages[0].id, "And now?")
    qtbot.waitUntil(lambda: not again.session.is_busy)
    assert prompts(again)[-1][-1][1] == sent.replace("What is the word?", "And now?")
    assert "[notes.txt] [paper.pdf]" in exported(again.session.current, ".md")
    assert "secret word" in exported(again.session.current, ".json")


def test_a_file_can_be_sent_without_a_word_and_names_the_chat(
    qtbot: QtBot, make_shell: MakeShell, notes: Path
) -> None:
    shell = make_shell(model=MODEL)
    shell.window.composer.files_given.emit([str(notes)])
    wait_until_read(qtbot, shell)
    assert shell.window.composer._send.isEnabled()
    ask(qtbot, shell, "")
    assert shell.session.current.title == "notes.txt"
    frame = '<file name="notes.txt">\nThe secret word is whale.\n</file>'
    assert prompts(shell) == [[("user", frame)]]
    shell.chat_presenter.edit(shell.session.current.messages[0].id, " ")
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert prompts(shell)[1:] == [[("user", frame)]], "nor is text required when editing"


def test_a_file_can_be_removed(qtbot: QtBot, make_shell: MakeShell, notes: Path) -> None:
    shell = make_shell(model=MODEL)
    shell.window.composer.files_given.emit([str(notes)])
    (chip,) = chips(shell)
    chip.removed.emit(chip.file)
    assert chips(shell) == []
    assert not shell.window.composer._send.isEnabled()
    ask(qtbot, shell, "Hi")
    assert prompts(shell) == [[("user", "Hi")]]


def test_each_chat_keeps_its_own_files(qtbot: QtBot, make_shell: MakeShell, notes: Path) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "First")
    first = shell.session.current.id
    shell.window.composer.files_given.emit([str(notes)])
    wait_until_read(qtbot, shell)
    shell.chat_presenter.new_chat()
    assert chips(shell) == []
    shell.chat_presenter.open_chat(first)
    assert [chip.name.text() for chip in chips(shell)] == ["notes.txt"]


def test_files_of_a_draft_are_there_after_a_restart(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path, notes: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("It goes.")
    shell = make_shell()
    assert drop(shell, notes, other)
    wait_until_read(qtbot, shell)
    chat = shell.session.current.id
    shell.window.close()
    notes.write_text("The secret word is dolphin.\n")
    other.unlink()
    again = make_shell()
    assert again.session.current.id == chat
    qtbot.waitUntil(lambda: "other.txt" in banner(again), timeout=20_000)
    wait_until_read(qtbot, again)
    assert [chip.name.text() for chip in chips(again)] == ["notes.txt"]
    again.models.open(MODEL)
    qtbot.waitUntil(lambda: again.client.model is not None)
    ask(qtbot, again, "What is the word?")
    assert "dolphin" in prompts(again)[-1][-1][1], "it was read again"
    assert again.session.current.draft_files == ()
    again.window.close()
    assert chips(make_shell()) == []


def test_a_file_larger_than_the_room_is_offered_in_parts(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("".join(f"Line {n} of the book.\n" for n in range(2000)))
    shell = make_shell(model=str(tiny_gguf(tmp_path / "m.gguf")))
    shell.window.composer.files_given.emit([str(book)])
    wait_until_read(qtbot, shell)
    (chip,) = chips(shell)
    assert chip.file.n_tokens is not None
    assert chip.file.n_tokens > 4096
    shell.chat_presenter.send("Sum up")
    assert prompts(shell) == []
    assert "are free in the context" in banner(shell)
    menu = chip.menu()
    titles = [action.text() for action in menu.actions()]
    assert titles[0].startswith(f"Part 1 of {len(titles)} · ")
    menu.actions()[1].trigger()
    (chip,) = chips(shell)
    assert chip.more.accessibleName().startswith(f"part 2 of {len(titles)} · ")
    ask(qtbot, shell, "Sum up")
    sent = prompts(shell)[-1][-1][1]
    assert sent.startswith(f'<file name="book.txt" part="2 of {len(titles)}">\nLine ')
    (file,) = shell.session.current.messages[0].attachments
    assert file.part == 2
    assert file.n_tokens < 4096 * 7 / 8
    assert len(file.text) < len(book.read_text()) / 2


def test_the_notice_attaches_the_first_part(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("".join(f"Line {n} of the book.\n" for n in range(2000)))
    shell = make_shell(model=str(tiny_gguf(tmp_path / "m.gguf")))
    shell.window.composer.files_given.emit([str(book)])
    wait_until_read(qtbot, shell)
    shell.chat_presenter.send("Sum up")
    shell.window.banner._action.click()
    ask(qtbot, shell, "Sum up")
    assert prompts(shell)[-1][-1][1].startswith('<file name="book.txt" part="1 of ')


def test_tokens_are_counted_once_a_model_is_there(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path, notes: Path
) -> None:
    shell = make_shell()
    shell.window.composer.files_given.emit([str(notes)])
    wait_until_read(qtbot, shell)
    assert chips(shell)[0].more.accessibleName() == "26 B"
    shell.models.open(str(tiny_gguf(tmp_path / "m.gguf")))
    qtbot.waitUntil(
        lambda: chips(shell)[0].more.accessibleName().endswith("tokens"), timeout=20_000
    )


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("photo.png", b"\x89PNG\r\n\x1a\n", "photo.png is not an image that models can read"),
        ("tool.exe", b"MZ\0\0", "tool.exe is not a text file."),
        ("scan.pdf", pdf(""), "scan.pdf contains images of pages but no text"),
        ("gone.txt", None, "gone.txt is not a readable file."),
    ],
)
def test_what_cannot_be_attached_is_said(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path, name: str, data: bytes | None, said: str
) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    shell = make_shell(model=MODEL)
    assert drop(shell, path)
    qtbot.waitUntil(lambda: banner(shell).startswith(said), timeout=20_000)
    assert chips(shell) == []


def test_pasted_files_are_taken(
    qtbot: QtBot, qapp: QApplication, make_shell: MakeShell, notes: Path
) -> None:
    shell = make_shell(model=MODEL)
    edit = shell.window.composer.edit
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(notes))])
    qapp.clipboard().setMimeData(data)
    edit.paste()
    assert [chip.name.text() for chip in chips(shell)] == ["notes.txt"]
    assert edit.toPlainText() == ""
    qapp.clipboard().setText("words")
    edit.paste()
    assert edit.toPlainText() == "words"
    wait_until_read(qtbot, shell)


def test_a_dropped_model_is_left_to_the_window(make_shell: MakeShell, notes: Path) -> None:
    shell = make_shell(model=MODEL)
    assert not drop(shell, Path("/models/other.gguf"), notes)
    assert chips(shell) == []


def test_a_file_stays_whose_tokens_cannot_be_counted(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path, notes: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shell = make_shell()
    shell.window.composer.files_given.emit([str(notes)])
    wait_until_read(qtbot, shell)
    monkeypatch.setattr(documents, "MAX_SECONDS", 0.0)
    shell.models.open(str(tiny_gguf(tmp_path / "m.gguf")))
    qtbot.waitUntil(lambda: shell.client.model is not None)
    qtbot.wait(300)
    assert [chip.accessibleName() for chip in chips(shell)] == ["notes.txt, 26 B"]
    ask(qtbot, shell, "Read it")
    assert "secret word" in prompts(shell)[-1][-1][1]


def test_a_file_that_takes_too_long_is_given_up(
    qtbot: QtBot, make_shell: MakeShell, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = "import time; print('{}', flush=True); time.sleep(600)"
    monkeypatch.setattr(files, "COMMAND", (sys.executable, "-c", hangs))
    monkeypatch.setattr(documents, "MAX_SECONDS", 0.3)
    shell = make_shell(model=MODEL)
    shell.window.composer.files_given.emit([str(notes)])
    qtbot.waitUntil(lambda: "too much time" in banner(shell), timeout=20_000)
    assert chips(shell) == []


def test_a_message_waits_for_its_files(qtbot: QtBot, make_shell: MakeShell, notes: Path) -> None:
    shell = make_shell(model=MODEL)
    shell.window.composer.files_given.emit([str(notes)])
    shell.chat_presenter.send("Now")
    assert banner(shell) == "notes.txt is still being read."
    assert prompts(shell) == []
    wait_until_read(qtbot, shell)


def test_the_button_and_the_chips_have_names(
    qtbot: QtBot, make_shell: MakeShell, notes: Path
) -> None:
    shell = make_shell(model=MODEL)
    assert shell.chat_presenter.files.attach.accessibleName() == "Attach files and images"
    shell.window.composer.files_given.emit([str(notes)])
    wait_until_read(qtbot, shell)
    assert chips(shell)[0].accessibleName() == "notes.txt, 26 B"
