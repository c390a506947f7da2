"""Shortcuts, versions, licences and the log: shown, searched and copied."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from PySide6.QtCore import QLibraryInfo, Qt, qVersion
from PySide6.QtGui import QGuiApplication
from pytestqt.qtbot import QtBot

from app.core.paths import log_file
from app.core.process.crash import LogFile, read_log
from app.main import Shell
from app.widgets.shortcuts import SHORTCUTS, shown_keys
from app.window.help.diagnostics import all_components, versions
from app.window.help.dialogs import filtered
from app.window.help.licences import licence_text, packages
from engine import DeviceInfo
from tests.helpers.shell_driver import MODEL, MakeShell, ask


def press_f1(qtbot: QtBot, shell: Shell) -> None:
    shell.window.activateWindow()
    qtbot.waitUntil(shell.window.isActiveWindow)
    qtbot.keyClick(shell.window.composer.edit, Qt.Key.Key_F1)
    qtbot.waitUntil(lambda: shell.help.shortcuts is not None)


def test_f1_lists_every_shortcut_with_its_keys(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    press_f1(qtbot, shell)
    dialog = shell.help.shortcuts
    assert dialog is not None
    assert set(dialog.rows) == set(SHORTCUTS)
    for name, (text, keys) in dialog.rows.items():
        assert text.text() == SHORTCUTS[name].text
        assert shown_keys(name)[0] in keys.text()


def test_the_list_of_shortcuts_is_searched(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    press_f1(qtbot, shell)
    dialog = shell.help.shortcuts
    assert dialog is not None
    qtbot.keyClicks(dialog.search, "ctrl+ chat")
    found = [name for name, (text, _) in dialog.rows.items() if text.isVisible()]
    assert found == ["new-chat", "search-chats", "toggle-chats"]
    qtbot.keyClick(dialog.search, Qt.Key.Key_Escape)
    assert not dialog.isVisible()


def test_versions_name_what_runs_here() -> None:
    told = dict(versions([DeviceInfo("cuda:0", "cuda", "GPU", 1, 1, driver="580.65")]))
    assert told["PyTorch"] == metadata.version("torch")
    assert told["GPU driver"] == "580.65"
    assert all(told.values())


def test_components_are_all_dependencies_with_their_licences() -> None:
    found = {component.name.lower(): component for component in packages()}
    assert {"torch", "numpy", "jinja2", "psutil"} <= set(found)
    assert "markupsafe" in found  # of jinja2
    assert "pytest" not in found
    assert "MIT" in found["markdown-it-py"].licence
    assert "BSD" in found["psutil"].licence
    assert len(found["numpy"].licence) < 100
    assert "Redistribution" in licence_text(found["numpy"])


def test_every_component_has_the_text_of_its_licence() -> None:
    """Including packages without licence texts, and components that are not packages."""
    found = {component.name: component for component in all_components()}
    assert {"Tandem", "Qt", "Python", "Inter"} <= set(found)
    assert [c.name for c in found.values() if len(licence_text(c)) < 200] == []
    assert [c.name for c in found.values() if not c.licence or c.licence == "not stated"] == []
    assert "GNU LESSER GENERAL PUBLIC LICENSE" in licence_text(found["PySide6_Essentials"])
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in licence_text(found["Python"])
    assert "SIL OPEN FONT LICENSE" in licence_text(found["Inter"])
    assert "freetype" in licence_text(found["pypdfium2"]).lower()  # inside PDFium


def test_qt_can_be_replaced_by_what_is_said_of_it() -> None:
    """Version, location, replacement, sources, and both licences in full, as the LGPL requires."""
    (qt,) = (c for c in all_components() if c.name == "Qt")
    text = licence_text(qt)
    folder = Path(QLibraryInfo.path(QLibraryInfo.LibraryPath.LibrariesPath))
    assert list(folder.glob("*Qt6Core*"))
    for words in (
        qVersion(), str(folder), "linked dynamically", "You may replace them",
        "The source code of Qt", "GNU LESSER GENERAL PUBLIC LICENSE", "GNU GENERAL PUBLIC LICENSE",
        "harfbuzz", "ICU",
    ):  # fmt: skip
        assert words in text


def test_libraries_that_come_along_have_their_licences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "lib" / "licences"
    folder.mkdir(parents=True)
    (folder / "libxcb-cursor0.txt").write_text("MIT, of the X.Org Foundation")
    monkeypatch.setattr("app.window.help.diagnostics.ROOT", tmp_path / "src")
    (found,) = (c for c in all_components() if c.name == "System libraries")
    assert licence_text(found) == "libxcb-cursor0\n\nMIT, of the X.Org Foundation"


def test_about_shows_a_licence_as_plain_text(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    shell.settings_page.toggle()
    shell.settings_page.view.about_requested.emit()
    dialog = shell.help.about
    assert dialog is not None
    qtbot.waitUntil(lambda: dialog.list.count() > 10)
    assert "PyTorch " in dialog.versions.text()
    row = next(r for r in range(dialog.list.count()) if "numpy" in dialog.list.item(r).text())
    dialog.list.setCurrentRow(row)
    qtbot.waitUntil(lambda: "Redistribution" in dialog.text.toPlainText())
    dialog.search.setText("lgpl")
    shown = [r for r in range(dialog.list.count()) if not dialog.list.item(r).isHidden()]
    assert {dialog.list.item(r).text().split()[0] for r in shown} == {
        "Qt", "PySide6_Essentials", "shiboken6"
    }  # fmt: skip


@pytest.fixture
def log(home: Path) -> Iterator[Path]:
    kept = LogFile(log_file())
    kept.start()
    yield log_file()
    kept.stop()


def test_the_log_has_what_the_window_notes_and_no_chatter_of_libraries(log: Path) -> None:
    logging.getLogger("app.models.current").info("a model was opened")
    logging.getLogger("engine.hosts.thread_host").warning("something is odd")
    logging.getLogger("httpx").info("GET https://example.org/?token=abc")
    logging.getLogger("httpx").warning("no answer")
    lines = read_log(log)
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO app.models.current: a model was opened",
        "WARNING engine.hosts.thread_host: something is odd",
        "WARNING httpx: no answer",
    ]


def test_the_log_stays_small(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(60_000):
        logging.getLogger("app").info("line %d of many, to fill the file", number)
    sizes = [file.stat().st_size for file in log.parent.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= (1 << 20) + 200
    lines = read_log(log)
    assert lines[-1].endswith("line 59999 of many, to fill the file")
    assert len(lines) > 5000  # from the previous file too


def test_a_folder_that_cannot_be_made_costs_only_the_log(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kept = LogFile(tmp_path / "file" / "log" / "window.log")
    kept.start()
    logging.getLogger("app").info("nowhere")
    kept.stop()
    assert read_log(kept.path) == []


LINES = [
    "2026-01-01 10:00:00,000 INFO app.main: started",
    "2026-01-01 10:00:01,000 ERROR app.core.process.crash: a bug in the window",
    "Traceback (most recent call last):",
    '  File "app/main.py", line 7, in go',
    "2026-01-01 10:00:02,000 WARNING engine.hosts.thread_host: slow",
]


@pytest.mark.parametrize(
    ("least", "words", "expected"),
    [
        (0, "", LINES),
        (1, "", LINES[1:]),
        (2, "", LINES[1:4]),
        (0, "MAIN.PY bug", LINES[1:4]),
        (1, "started", []),
    ],
)
def test_records_are_filtered_whole(least: int, words: str, expected: list[str]) -> None:
    assert filtered(LINES, least, words) == expected


def test_the_viewer_shows_filters_and_copies(
    qtbot: QtBot, make_shell: MakeShell, log: Path
) -> None:
    shell = make_shell(model=MODEL)
    logging.getLogger("app.test").error("a rare mistake")
    shell.settings_page.toggle()
    shell.settings_page.view.log_requested.emit()
    dialog = shell.help.log
    assert dialog is not None
    qtbot.waitUntil(lambda: "a rare mistake" in dialog.text.toPlainText())
    dialog.level.setCurrentIndex(2)
    assert dialog.text.toPlainText().count("\n") == 0
    dialog.search.setText("nothing like this")
    assert "No entries" in dialog.text.toPlainText()
    QGuiApplication.clipboard().clear()
    dialog.copy.click()
    qtbot.waitUntil(lambda: QGuiApplication.clipboard().text() != "")
    text = QGuiApplication.clipboard().text()
    assert text.startswith("# Tandem diagnostics\nTandem: ")
    assert "a rare mistake" in text
    assert "cpu: " in text


def test_no_planted_secret_is_in_the_diagnostics(
    qtbot: QtBot, make_shell: MakeShell, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of chats and settings, names, folders and tokens, wherever they may be logged."""
    monkeypatch.setattr("getpass.getuser", lambda: "marguerite")
    monkeypatch.setattr("platform.node", lambda: "margas-laptop.example.org")
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Velociraptor diagnosis please")
    secret_prompt = "You know that my cat is called Zenobia."
    shell.keep(
        replace(
            shell.settings.current,
            system_prompt=secret_prompt,
            model_folders=("/srv/hidden-project",),
            sampling={"stop": ("Quetzalcoatl",), "temperature": 0.3},
        )
    )
    app_log = logging.getLogger("app.test")
    app_log.info("opened /home/marguerite/hidden-project/model.gguf")
    app_log.info("opened /srv/with room/hidden-project/other.gguf")
    app_log.info(r"opened C:\Users\marguerite\hidden-project\model.gguf")
    app_log.info("asked https://marguerite:pass@hub.example/hidden-project?token=hf_ABCDEFGHIJKLMN")
    app_log.info("Authorization: Bearer abcdefghijklmnopqrstuvwx")
    app_log.info("token=ghp_ABCDEFGHIJKLMNOP on margas-laptop")
    app_log.info("key 0123456789abcdef0123456789abcdef0123456789abcdef")
    app_log.info("Chat “Velociraptor diagnosis please” was exported")
    app_log.info("Something went wrong in the window (ValueError: cat Zenobia is hungry).")
    app_log.info("the prompt was %s", secret_prompt)
    try:
        raise KeyError("Quetzalcoatl in hidden-project")
    except KeyError:
        app_log.exception("it failed")
    shell.help.show_log()
    dialog = shell.help.log
    assert dialog is not None
    QGuiApplication.clipboard().clear()
    dialog.copy.click()
    qtbot.waitUntil(lambda: QGuiApplication.clipboard().text() != "")
    text = QGuiApplication.clipboard().text()
    for secret in (
        "Velociraptor", "Zenobia", "Quetzalcoatl", "hidden-project", "marguerite", "margas",
        "abcdefghijklmnop", "ABCDEFGHIJK", "0123456789abcdef", "pass@",
    ):  # fmt: skip
        assert secret.lower() not in text.lower(), secret
    for kept in ("model.gguf", "hub.example", "KeyError", "it failed", "test_help.py", "<39 char"):
        assert kept in text, kept
    assert "temperature 0.3" in text
