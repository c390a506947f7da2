"""Export and import of chats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtWidgets import QFileDialog, QMessageBox
from pytestqt.qtbot import QtBot

from app.chat.conversation import Conversation
from app.chat.export import FORMATS, PDF, NotAChat, exported, file_name, imported, with_suffix
from app.chat.images.album import write_for_others
from app.chat.message import AnswerStats, Message
from app.chat.search import searched_text
from app.chat.tool_use import ToolUse
from tests.helpers.old_chats import write_chat
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner, shown

STATS = AnswerStats("stop", 3, 10.0, 0.1, 20)


def chat() -> Conversation:
    made = Conversation(title="Tables <b>", system_prompt="Be brief.\nAlways.")
    made.add(Message("user", "Show <i>one</i>,\nplease."))
    made.add(Message("assistant", "<think>hm</think>\n\n| a |\n|---|\n| `<x>` |", STATS))
    return made


def test_calls_are_exported_and_found_with_nothing_in_them_read_as_markup() -> None:
    """The answer continues after the result, below one heading."""
    call = ToolUse(
        "1", "web_search", "web", "Se`arch", '{"q": "```\\n# no"}', "done", "a\n```\n<b>x"
    )
    made = Conversation(title="T")
    made.add(Message("user", "Look"))
    made.add(Message("assistant", "I look.", STATS, calls=(call,)))
    made.add(Message("assistant", "So.", STATS))
    assert exported(made, ".md") == (
        "# T\n\n## You\n\nLook\n\n## Answer\n\nI look.\n\nTool: `Se'arch · web`\n\nArguments\n\n"
        '````\n{"q": "```\\n# no"}\n````\n\nResult\n\n````\na\n```\n<b>x\n````\n\nSo.\n'
    )
    page = exported(made, ".html")
    assert page.count('class="speaker"') == 2
    assert "&lt;b&gt;x" in page
    assert [one.id for one in made.tree if "<b>x" in searched_text(one)] == [2]


def test_markdown_has_what_was_said_without_thoughts() -> None:
    assert exported(chat(), ".md") == (
        "# Tables <b>\n\n**System prompt**\n\n> Be brief.\n> Always.\n\n"
        "## You\n\nShow <i>one</i>,\nplease.\n\n"
        "## Answer\n\n| a |\n|---|\n| `<x>` |\n"
    )


def test_a_web_page_shows_words_as_words() -> None:
    page = exported(chat(), ".html")
    assert "<title>Tables &lt;b&gt;</title>" in page
    assert "Show &lt;i&gt;one&lt;/i&gt;,<br>please." in page
    assert "<td><code>&lt;x&gt;</code></td>" in page
    assert "hm" not in page


@pytest.mark.parametrize(
    "attack",
    [
        "<script>alert(1)</script>", "<img src=x onerror=alert(1)>",
        "[x](javascript:alert(1))", "![x](https://evil.example/a.png)", "</p><script>",
    ],
)  # fmt: skip
@pytest.mark.parametrize("role", ["user", "assistant", "<script>"])
def test_nothing_that_was_said_acts_in_a_web_page(attack: str, role: str) -> None:
    """Image URLs are not fetched either: the page's policy forbids it."""
    made = Conversation.of([Message(role, attack)], title=attack, system_prompt=attack)
    page = exported(made, ".html")
    assert "<script" not in page.lower()
    assert "<img src=x" not in page
    assert 'href="javascript' not in page
    assert "default-src 'none'" in page


def test_json_comes_back_as_a_chat_of_its_own(tmp_path: Path) -> None:
    before = chat()
    path = tmp_path / "a.json"
    path.write_text(exported(before, ".json"), encoding="utf-8")
    after = imported(path)
    assert after.id != before.id
    after.id = before.id
    assert after == before


def test_json_has_all_versions_and_the_others_what_is_shown(tmp_path: Path) -> None:
    made = chat()
    made.add(Message("assistant", "Another answer."), 1)
    made.tree.choose(2)
    path = tmp_path / "a.json"
    path.write_text(exported(made, ".json"), encoding="utf-8")
    found = imported(path)
    assert found.tree == made.tree
    assert [m.content for m in found.tree.versions(3)] == [m.content for m in made.tree.versions(2)]
    for suffix in (".md", ".html"):
        assert "Another answer." not in exported(made, suffix)
    made.tree.choose(3)
    for suffix in (".md", ".html"):
        assert "Another answer." in exported(made, suffix)


def test_a_chat_of_a_newer_version_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(chat().to_json() | {"schema": 99}))
    with pytest.raises(
        NotAChat, match=r"^a\.json cannot be read: it was written by a newer version"
    ):
        imported(path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "3", '{"id": 1}', '{"messages": 5}', "[" * 100_000, "\x00"]
)
def test_what_is_no_chat_is_a_sentence(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(NotAChat, match=r"^a\.json is not a chat exported by Tandem\.$"):
        imported(path)
    with pytest.raises(NotAChat, match="cannot be read"):
        imported(tmp_path / "none.json")


@pytest.mark.parametrize("damage", ["cut", "a byte in the head", "a message in the middle", "flip"])
def test_whole_messages_of_a_damaged_chat_come_back(tmp_path: Path, damage: str) -> None:
    texts = ["one, {2}", "two", 'three "quoted", {"role": "user"}', "four", "five"]
    chat = Conversation.of([Message("user" if n % 2 else "assistant", text)
                            for n, text in enumerate(texts, 1)], title="Numbers")  # fmt: skip
    path = tmp_path / "a.json"
    write_chat(path, chat)
    data = path.read_bytes()
    place = data.index(b"four")
    damaged = {
        "cut": data[: data.index(b"five")],
        "a byte in the head": data.replace(b'"created": ', b'"created"\xff ', 1),
        "a message in the middle": data[: place - 4] + data[place + 4 :],
        "flip": data[:place] + b'"' + data[place:],
    }[damage]
    path.unlink()
    path.write_bytes(damaged)
    found = imported(path)
    kept = {"cut": texts[:4], "a byte in the head": texts}.get(damage, [*texts[:3], "five"])
    assert [message.content for message in found.messages] == kept
    assert found.shown_title.endswith("(recovered)")
    assert found.id != chat.id
    assert path.read_bytes() == damaged


def test_a_title_that_is_a_device_of_windows_makes_another_name() -> None:
    for title in ("CON", "nul.txt", "com1"):
        assert file_name(Conversation(title=title)) == f"_{title}"
    assert file_name(Conversation(title="Console")) == "Console"


@given(st.text(max_size=200))
def test_any_title_makes_a_file_name(title: str) -> None:
    name = file_name(Conversation(title=title))
    assert 0 < len(name) <= 80
    assert not set(name) & set('/\\:*?"<>|\x00\n')
    assert name not in (".", "..")


@given(st.text(max_size=60), st.sampled_from(sorted({*FORMATS} - {PDF})))
def test_any_text_can_be_exported(text: str, suffix: str) -> None:
    made = Conversation.of([Message("user", text), Message("assistant", text)], title=text)
    assert exported(made, suffix)
    if suffix == ".json":
        assert json.loads(exported(made, suffix))["title"] == text


@pytest.mark.parametrize(
    ("chosen", "kind", "written"),
    [("a.md", "", "a.md"), ("a.HTML", "", "a.HTML"), ("a", "JSON (*.json)", "a.json"),
     ("v1.2", "Markdown (*.md)", "v1.2.md"), ("a", "", "a.md"), ("a.md", "PDF (*.pdf)", "a.pdf"),
     ("a.html", "Markdown (*.md)", "a.html")],
)  # fmt: skip
def test_the_suffix_follows_from_the_name_or_the_kind(chosen: str, kind: str, written: str) -> None:
    assert with_suffix(Path("/x", chosen), kind) == Path("/x", written)


def test_a_chat_goes_out_of_a_window_and_into_another(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi <there>")
    path, revealed = tmp_path / "out.json", list[Path]()
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_: (str(path), ""))
    monkeypatch.setattr(QFileDialog, "getOpenFileNames", lambda *_: ([str(path)], ""))
    rows = shell.window.chat_list.list
    rows.export_requested.emit([shell.session.current.id], "")
    qtbot.waitUntil(lambda: banner(shell) == f"“Hi <there>” was saved as {path}.")
    new = tmp_path / "new"
    new.touch()
    assert path.stat().st_mode == new.stat().st_mode, "others may read the exported file"
    notice = shell.window.banner.notice
    assert notice is not None
    monkeypatch.setattr("app.chat.exchange.dialogs.reveal", revealed.append)
    assert notice.on_action is not None
    notice.on_action()
    assert revealed == [path]
    rows.import_requested.emit()
    qtbot.waitUntil(lambda: len(shell.session.library.summaries) == 2)
    assert shown(shell) == ["Hi <there>", "Hello from the fake model."]
    shell.window.close()
    again = make_shell()
    assert len(again.session.library.summaries) == 2
    path.write_text("{}")
    rows = again.window.chat_list.list
    rows.import_requested.emit()
    qtbot.waitUntil(lambda: banner(again) == "out.json is not a chat exported by Tandem.")
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_: (str(tmp_path), "x"))
    monkeypatch.setattr("app.chat.exchange.dialogs.with_suffix", lambda path, kind: path)
    rows.export_requested.emit([again.session.current.id], "")
    qtbot.waitUntil(lambda: "cannot be written: Is a directory." in banner(again))


def test_another_kind_does_not_replace_a_file_unasked(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dialog has confirmed the name that it returns, but not the final one."""
    shell, old, answers = make_shell(model=MODEL), tmp_path / "out.html", ["No", "Yes"]
    old.write_text("mine")
    ask(qtbot, shell, "Hi")
    asked: list[str] = []

    def chosen(_: object, title: str, place: str, __: str) -> tuple[str, str]:
        asked.append(place)
        return str(tmp_path / "out.md"), "Web page (*.html)"

    monkeypatch.setattr(QFileDialog, "getSaveFileName", chosen)
    buttons = QMessageBox.StandardButton
    monkeypatch.setattr(QMessageBox, "question", lambda *_: getattr(buttons, answers.pop(0)))
    rows = shell.window.chat_list.list
    rows.export_requested.emit([shell.session.current.id], "")
    assert old.read_text() == "mine"
    rows.export_requested.emit([shell.session.current.id], "")
    qtbot.waitUntil(lambda: banner(shell) == f"“Hi” was saved as {old}.")
    assert "<h1>Hi</h1>" in old.read_text()
    assert asked[1] == str(tmp_path / "Hi.md"), "it starts in the last folder"


def test_a_full_disk_leaves_no_empty_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_for_others(tmp_path / "a.md", b"text")
    assert list(tmp_path.iterdir()) == []
