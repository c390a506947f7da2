"""The models page in the running window: what it finds, says, opens and keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QFileDialog, QMessageBox, QPushButton, QToolButton
from pytestqt.qtbot import QtBot

from app.core.engine_client import EngineState, RunningAnswer
from app.core.paths import models_dir
from app.core.settings import Settings
from app.core.units import decimal_size, rate_text
from app.main import Shell
from app.models.library.library_session import (
    LastUse,
    LibraryEntry,
    LibrarySession,
    Prospect,
    RunningModel,
    last_use,
)
from app.models.library.library_view import (
    HEADERS,
    MARK,
    ZERO_WIDTH_SPACE,
    DetailsDialog,
    LibraryView,
    count_text,
    outlook,
)
from app.models.library.scan import FoundModel
from engine import EngineError, Finished, Load, Timings, Usage
from engine.model.architectures.info import read_model_info
from tests.helpers.fake_host import model_info
from tests.helpers.shell_driver import MakeShell, ask, banner, host_of
from tests.helpers.tiny_gguf import tiny_gguf

MODEL, OUTLOOK, FROM = 0, HEADERS.index("On these devices"), HEADERS.index("From")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with two models and a file that is none; the home has nothing."""
    monkeypatch.setattr("app.models.library.scan.Path.home", lambda: tmp_path / "nobody")
    for name in ("HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    made = tmp_path / "models"
    made.mkdir()
    tiny_gguf(made / "beta.gguf", n_layer=2, n_head_kv=2)
    tiny_gguf(made / "alpha.gguf", n_layer=4, n_head_kv=2)
    (made / "letter.gguf").write_text("Dear reader")
    return made


@pytest.fixture
def shell(
    qtbot: QtBot, make_shell: MakeShell, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shell]:
    made = make_shell()
    monkeypatch.setattr("engine.read_model_info", read_model_info)  # the files here are real
    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *_: str(folder))
    qtbot.waitUntil(lambda: made.start_up.is_ready)
    yield made
    made.library.close()


def view_of(shell: Shell) -> LibraryView:
    assert shell.library.view is not None
    return shell.library.view


def session_of(shell: Shell) -> LibrarySession:
    assert shell.library.session is not None
    return shell.library.session


def rows(view: LibraryView) -> list[list[str]]:
    model = view.table.model()
    columns = range(model.columnCount())
    return [[str(model.index(row, c).data()) for c in columns] for row in range(model.rowCount())]


def show(qtbot: QtBot, shell: Shell) -> LibraryView:
    """Press the rail's button, add the folder, and wait until all is known."""
    buttons = shell.window._rail.findChildren(QToolButton)
    next(button for button in buttons if button.accessibleName() == "Models").click()
    view = view_of(shell)
    assert view.isVisible()
    view.folder_requested.emit()
    qtbot.waitUntil(lambda: len(rows(view)) == 3 and not session_of(shell).is_busy, timeout=20_000)
    return view


def test_models_of_a_folder_are_listed_with_what_they_would_do_here(
    qtbot: QtBot, shell: Shell, folder: Path
) -> None:
    view = show(qtbot, shell)
    found = rows(view)
    assert [row[MODEL] for row in found] == ["alpha", "beta", "letter"]
    assert [row[FROM] for row in found] == ["Your folders"] * 3
    assert found[2][OUTLOOK] == "cannot be opened"
    assert "tok/s" in found[0][OUTLOOK] or "fits" in found[0][OUTLOOK]
    assert view._status.text() == "3 models"
    assert shell.settings.current.model_folders == (str(folder),)


def test_enter_opens_a_model_and_the_chat_is_back(qtbot: QtBot, shell: Shell, folder: Path) -> None:
    view = show(qtbot, shell)
    view.search.setText("BET")
    assert [row[MODEL] for row in rows(view)] == ["beta"]
    qtbot.keyClick(view.search, Qt.Key.Key_Return)
    assert not view.isVisible()
    qtbot.waitUntil(lambda: shell.client.model is not None)
    loads = [command for command in host_of(shell).commands if isinstance(command, Load)]
    assert loads[-1].params.path == str(folder / "beta.gguf")


def test_escape_and_a_second_press_lead_back(qtbot: QtBot, shell: Shell) -> None:
    view = show(qtbot, shell)
    qtbot.keyClick(view.search, Qt.Key.Key_Escape)
    assert not view.isVisible()
    assert shell.window.start_view.isVisible()
    shell.window.models_requested.emit()
    assert view.isVisible()
    shell.window.models_requested.emit()
    assert not view.isVisible()


def test_a_page_takes_the_place_of_the_message_and_is_marked(qtbot: QtBot, shell: Shell) -> None:
    view, window = show(qtbot, shell), shell.window
    assert not window.composer.isVisible()
    marks = {name: button.isChecked() for name, button in window._page_buttons.items()}
    assert marks == {"models": True, "settings": False}
    view.table.setFocus()
    view.table.hide()  # what is typed then belongs to the page
    assert window.isAncestorOf(focused := QApplication.focusWidget())
    assert focused is not window.composer.edit
    view.table.show()
    shell.settings_page.toggle()
    assert window._page_buttons["settings"].isChecked()
    assert not window._page_buttons["models"].isChecked()
    shell.settings_page.toggle()
    assert window.composer.isVisible()
    assert window.composer.edit.hasFocus()
    assert not any(button.isChecked() for button in window._page_buttons.values())


def test_without_models_the_page_offers_ways_to_get_some(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell()
    qtbot.waitUntil(lambda: shell.start_up.is_ready)
    shell.library.toggle()
    view, tabs = view_of(shell), shell.library.tabs
    assert tabs is not None
    qtbot.waitUntil(lambda: not view.table.isVisible())
    words = {button.text() for button in view.findChildren(QPushButton) if button.isVisible()}
    assert {"Download a model…", "Add folder…"} <= words
    view.download_requested.emit()
    assert tabs.currentIndex() == 1
    shell.library.toggle()
    shell.window.start_view.download_requested.emit()
    assert tabs.isVisible()
    assert tabs.currentIndex() == 1
    shell.library.close()


def test_a_narrow_page_does_without_some_columns(qtbot: QtBot, shell: Shell, folder: Path) -> None:
    view = show(qtbot, shell)
    table = view.table

    def shown() -> list[str]:
        return [text for n, text in enumerate(HEADERS) if not table.isColumnHidden(n)]

    table.setParent(None)
    table.show()
    table.resize(1400, 300)
    assert shown() == list(HEADERS)
    qtbot.waitUntil(lambda: table.horizontalHeader().length() == table.viewport().width())
    table.resize(420, 300)
    assert shown() == ["Model", "On these devices"]
    qtbot.waitUntil(lambda: table.horizontalHeader().length() == table.viewport().width())
    table.deleteLater()


def test_a_pinned_model_comes_first_in_any_order(qtbot: QtBot, shell: Shell, folder: Path) -> None:
    view = show(qtbot, shell)
    beta = str(folder / "beta.gguf")
    view.pin_requested.emit(beta)
    assert shell.settings.current.pinned_models == (beta,)
    for order in (Qt.SortOrder.AscendingOrder, Qt.SortOrder.DescendingOrder):
        view.table.sortByColumn(HEADERS.index("Size"), order)
        assert rows(view)[0][MODEL] == "★ beta"
    assert [action.text() for action in view.menu_for(beta).actions()][1] == "Unpin"
    view.pin_requested.emit(beta)
    assert shell.settings.current.pinned_models == ()


def test_a_file_that_arrives_appears_and_one_that_goes_vanishes(
    qtbot: QtBot, shell: Shell, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.models.library.library_session.SETTLE_MS", 10)
    view = show(qtbot, shell)
    session_of(shell)._settle.setInterval(10)
    tiny_gguf(folder / "gamma.gguf", n_layer=2)
    qtbot.waitUntil(lambda: "gamma" in [row[MODEL] for row in rows(view)], timeout=20_000)
    (folder / "letter.gguf").unlink()
    qtbot.waitUntil(lambda: "letter" not in [row[MODEL] for row in rows(view)], timeout=20_000)


def test_the_whole_header_can_be_read_and_searched(
    qtbot: QtBot, shell: Shell, folder: Path
) -> None:
    view = show(qtbot, shell)
    view.details_requested.emit(str(folder / "beta.gguf"))
    qtbot.waitUntil(lambda: bool(view.findChildren(DetailsDialog)))
    (dialog,) = view.findChildren(DetailsDialog)
    assert dialog.tensors.model().rowCount() > 10
    dialog.search.setText("BLOCK_COUNT")
    model = dialog.metadata.model()
    assert [model.index(0, column).data() for column in (0, 1)] == ["llama.block_count", "2"]
    assert dialog.tensors.model().rowCount() == 0
    dialog.close()
    view.details_requested.emit(str(folder / "letter.gguf"))
    qtbot.waitUntil(lambda: "letter.gguf is not a usable GGUF file" in banner(shell))


@pytest.mark.parametrize("answer", ["Yes", "No"])
def test_all_files_of_a_model_go_to_the_trash_after_a_question(
    qtbot: QtBot, shell: Shell, folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """Parts and eyes go together, but eyes stay where another model needs them."""
    moved: list[Path] = []
    asked: list[str] = []
    own = folder / "seer"
    own.mkdir()
    first = own / "seer-00001-of-00002.gguf"
    for path in (first, own / "seer-00002-of-00002.gguf", own / "mmproj-F16.gguf"):
        path.write_text("GGUF")
    (folder / "mmproj-shared.gguf").write_text("GGUF")
    (folder / "letter.gguf").unlink()
    monkeypatch.setattr("send2trash.send2trash", moved.append)
    button = getattr(QMessageBox.StandardButton, answer)
    monkeypatch.setattr(QMessageBox, "question", lambda *a: asked.append(a[2]) or button)
    view = show(qtbot, shell)
    view.remove_requested.emit(str(first))
    assert asked == ["Move seer to the trash (3 files, 12 B)?"]
    three = [first, own / "seer-00002-of-00002.gguf", own / "mmproj-F16.gguf"]
    qtbot.waitUntil(lambda: moved == (three if answer == "Yes" else []))
    view.remove_requested.emit(str(folder / "beta.gguf"))
    three.append(folder / "beta.gguf")
    qtbot.waitUntil(lambda: moved == (three if answer == "Yes" else []))


def test_what_cannot_be_moved_to_the_trash_is_said(
    qtbot: QtBot, shell: Shell, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("send2trash.send2trash", fail)
    monkeypatch.setattr(QMessageBox, "question", lambda *_: QMessageBox.StandardButton.Yes)
    view = show(qtbot, shell)
    view.remove_requested.emit(str(folder / "beta.gguf"))
    qtbot.waitUntil(lambda: "beta.gguf could not be moved" in banner(shell))
    assert (folder / "beta.gguf").is_file()


def test_what_other_programs_keep_is_removed_there(
    qtbot: QtBot, shell: Shell, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "letter.gguf").unlink()
    theirs = tmp_path / "nobody/.lmstudio/models/acme/tiny.gguf"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("GGUF")
    view = show(qtbot, shell)
    last = view.menu_for(str(theirs)).actions()[-1]
    assert last.text() == "Remove it in LM Studio"
    assert not last.isEnabled()
    assert view.menu_for(str(folder / "beta.gguf")).actions()[-1].isEnabled()


def test_an_opened_model_of_another_folder_is_listed(
    qtbot: QtBot, shell: Shell, tmp_path: Path
) -> None:
    """And the page without one says where it looks."""
    shell.library.toggle()
    assert str(models_dir()) in view_of(shell)._where.text().replace(ZERO_WIDTH_SPACE, "")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("gamma.gguf", "other.gguf"):
        tiny_gguf(elsewhere / name, n_layer=2, n_head_kv=2)
    shell.library.toggle()
    shell.models.open(str(elsewhere / "gamma.gguf"))
    qtbot.waitUntil(lambda: shell.client.model is not None)
    shell.library.toggle()
    view = view_of(shell)
    qtbot.waitUntil(lambda: bool(rows(view)) and not session_of(shell).is_busy)
    assert [(row[MODEL], row[FROM]) for row in rows(view)] == [("● gamma · loaded", "Opened")]
    assert view.menu_for(str(elsewhere / "gamma.gguf")).actions()[-1].isEnabled()


def test_a_model_remembers_how_it_ran_the_last_time(
    qtbot: QtBot, shell: Shell, folder: Path
) -> None:
    beta, alpha = str(folder / "beta.gguf"), str(folder / "alpha.gguf")
    shell.models.open(beta)
    qtbot.waitUntil(lambda: shell.client.model is not None)
    shell.keep(shell.settings.current.with_plan(alpha, {"mode": 3, "ranks": [None, {}]}))
    ask(qtbot, shell, "Hi")
    speed = shell.settings.current.speeds[beta]
    assert speed > 0
    column = HEADERS.index("Last run")
    view = show(qtbot, shell)
    assert [row[column] for row in rows(view)] == ["–", f"{rate_text(speed)} tok/s", "–"]
    assert str(view.table.model().index(1, column).data(Qt.ItemDataRole.ToolTipRole))


def marked(view: LibraryView) -> dict[str, str]:
    """Return the names that have a mark, as they are shown and as they are spoken."""
    rows = range(view.table.model().rowCount())
    names = [view.table.model().index(row, MODEL) for row in rows]
    spoken = Qt.ItemDataRole.AccessibleTextRole
    return {str(name.data()): str(name.data(spoken)) for name in names if name.data(MARK)}


def test_the_loaded_model_is_marked(qtbot: QtBot, shell: Shell, folder: Path) -> None:
    """In a load, after it, after one that fails, in another split, and not after its end."""
    view, host, loaded = show(qtbot, shell), host_of(shell), {"● beta · loaded": "beta, loaded"}
    assert marked(view) == {}
    host.script.hold = True
    shell.models.open(str(folder / "beta.gguf"))
    qtbot.waitUntil(lambda: marked(view) == {"beta · loading …": "beta, loading …"})
    host.let_go(host.script)
    qtbot.waitUntil(lambda: marked(view) == loaded)
    host.script.load_error, host.script.hold = EngineError("No."), True
    shell.models.open(str(folder / "alpha.gguf"))
    qtbot.waitUntil(lambda: len(marked(view)) == 2)
    host.let_go(host.script)
    qtbot.waitUntil(lambda: marked(view) == loaded and "No." in banner(shell))
    host.script.load_error = None
    model = shell.client.model
    assert model is not None
    shell.models.apply(model.params)
    qtbot.waitUntil(lambda: shell.client.state is EngineState.READY)
    assert marked(view) == loaded
    view.pin_requested.emit(str(folder / "beta.gguf"))
    assert marked(view) == {"★ ● beta · loaded": "beta, loaded, pinned"}
    view.search.setText("loaded")
    assert len(rows(view)) == 1
    view.search.clear()
    view.menu_for(str(folder / "beta.gguf")).actions()[0].trigger()
    qtbot.waitUntil(lambda: marked(view) == {})
    assert view.menu_for(str(folder / "beta.gguf")).actions()[0].text() == "Open"


def test_the_loaded_model_is_not_loaded_again_from_the_list(
    qtbot: QtBot, shell: Shell, folder: Path
) -> None:
    """Whatever name it was opened by; a file that has taken its place is."""
    link, file = folder / "link.gguf", folder / "letter.gguf"
    tiny_gguf(folder / "gamma", n_layer=2, n_head_kv=2)
    file.unlink()
    file.symlink_to(folder / "gamma")
    link.symlink_to(folder / "gamma")
    shell.models.open(str(link))
    qtbot.waitUntil(lambda: shell.client.model is not None)
    view = show(qtbot, shell)
    assert list(marked(view)) == ["● letter · loaded"]
    view.open_requested.emit(str(file))
    assert not view.isVisible()
    loads = [command for command in host_of(shell).commands if isinstance(command, Load)]
    assert len(loads) == 1
    file.unlink()
    tiny_gguf(file, n_layer=2, n_head_kv=2)
    view.open_requested.emit(str(file))
    qtbot.waitUntil(lambda: host_of(shell).commands[-1] != loads[0])


def test_a_model_of_a_server_marks_none(qtbot: QtBot, shell: Shell, folder: Path) -> None:
    running = RunningModel.at("http://nas:11435/v1#beta", "")
    assert running.mark(FoundModel(folder / "beta.gguf", "beta", "", 1, 0.0)) == ""
    assert running.mark(FoundModel(Path("http://nas"), "beta", "", 1, 0.0)) == ""


def test_the_remembered_speed_is_that_without_guesses(
    qtbot: QtBot, shell: Shell, folder: Path
) -> None:
    beta = str(folder / "beta.gguf")
    shell.models.open(beta)
    qtbot.waitUntil(lambda: shell.client.model is not None)
    usage = Usage(20, 0, 100, n_drafted=80, n_accepted=70)
    for saved_s, speed in ((1.0, 50.0), (0.0, 50.0)):  # in the second answer, it was not measured
        times = Timings(0.1, 1.0, 0.3, 200.0, 100.0, saved_s)
        shell.client.finished.emit(Finished("stop", usage, times), RunningAnswer(1))
        assert shell.settings.current.speeds[beta] == speed


def test_a_split_is_told_in_a_few_words() -> None:
    ranks = [{"on": True, "share": 0.6}, {"on": True, "share": 0.4}, {"on": False, "share": 0.0}]
    for plan, text in (
        ({"mode": "tensor", "ranks": ranks, "n_ctx": 32768}, "Tensor 60 : 40 · context 32k"),
        ({"mode": "layer", "ranks": ranks, "n_ctx": None}, "Layers 60 : 40"),
        ({"mode": "single", "ranks": ranks}, "One device"),
        ({"mode": [], "ranks": 3, "n_ctx": True}, ""),
        ({"ranks": [{"on": True, "share": 1e400}, {"on": True, "share": "x"}]}, ""),
        ([], ""),
    ):
        settings = Settings(plans={"/m": plan}, speeds={"/m": "fast"})
        assert last_use(settings, "/m") == LastUse(text, 0.0)


def test_words_of_a_file_are_shown_as_they_are(qtbot: QtBot, shell: Shell, folder: Path) -> None:
    """Neither a name nor an error of a file is read as HTML."""
    (folder / "<b>bold.gguf").write_text("x")
    (folder / "letter.gguf").unlink()
    view = show(qtbot, shell)
    row = next(row for row in range(3) if "<b>bold" in rows(view)[row][MODEL])
    index = view.table.model().index(row, OUTLOOK)
    tip = str(index.data(Qt.ItemDataRole.ToolTipRole))
    assert "&lt;b&gt;bold" in tip
    assert "<b>" not in tip


def test_the_outlook_is_told_as_far_as_it_is_known() -> None:
    found = FoundModel(Path("/m/a.gguf"), "a", "Your folders", 1, 0.0)
    info = model_info("/m/a.gguf")
    here = Prospect(True, 32768, ("cuda:0", "cuda:1"), 61.84)
    for entry, text in (
        (LibraryEntry(found), "…"),
        (LibraryEntry(found, info), "…"),
        (LibraryEntry(found, info, is_judged=True), "–"),
        (LibraryEntry(found, problem="It is a letter."), "cannot be opened"),
        (LibraryEntry(found, info, prospect=here), "~ 61.8 tok/s · 32k"),
        (LibraryEntry(found, info, prospect=replace(here, tokens_per_s=0.0)), "fits · 32k"),
        (LibraryEntry(found, info, prospect=replace(here, fits=False)), "too large"),
    ):
        assert outlook(entry).text == text
    assert outlook(LibraryEntry(found, info, prospect=here)).tip.startswith("On GPU 0, GPU 1 with")


@pytest.mark.parametrize(
    ("number", "size", "count"),
    [
        (999, "999 B", "999"),
        (1_500, "1.5 kB", "1.5 K"),
        (135_000_000, "135.0 MB", "135 M"),
        (8_030_000_000, "8.0 GB", "8.0 B"),
        (1_200_000_000_000, "1.2 TB", "1.2 T"),
    ],
)
def test_sizes_and_counts(number: int, size: str, count: str) -> None:
    assert decimal_size(number) == size
    assert count_text(number) == count
