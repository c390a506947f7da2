"""The settings page shows the declared settings and applies changes immediately."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import (
    QApplication,
    QComboBox,
    QListWidget,
    QPlainTextEdit,
    QSpinBox,
    QWidget,
)
from pytestqt.qtbot import QtBot

from app.core.paths import settings_file
from app.core.settings import SECTIONS, Settings, ShownSetting, shown_settings
from app.main import Shell
from app.widgets.theme import theme
from app.window.preferences.settings_view import SettingRow, SettingsView
from tests.helpers.shell_driver import MODEL, MakeShell
from tests.helpers.wheel import wheel


def page_of(qtbot: QtBot, shell: Shell) -> SettingsView:
    """Return the settings page, opened by its shortcut."""
    shell.window.activateWindow()
    qtbot.waitUntil(shell.window.isActiveWindow)
    qtbot.keyClick(
        shell.window.composer.edit, Qt.Key.Key_Comma, Qt.KeyboardModifier.ControlModifier
    )
    view = shell.settings_page.view
    assert view is not None
    qtbot.waitUntil(view.isVisible)
    return view


def stored(name: str) -> object:
    """Return a setting of the file; None if there is no file."""
    file = settings_file()
    return json.loads(file.read_text())[name] if file.is_file() else None


def visible(view: SettingsView) -> set[str]:
    return {name for name, row in view.rows.items() if row.isVisible()}


def test_every_declared_setting_has_a_row_and_says_what_it_does(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    view = page_of(qtbot, make_shell())
    assert view.search.hasFocus()
    assert visible(view) == set(shown_settings())
    for name, shown in shown_settings().items():
        assert shown.section in SECTIONS, name
        assert shown.help.endswith("."), name
        assert view.rows[name].editor.field.accessibleName() == shown.title


def test_a_choice_is_used_at_once_written_and_reset(qtbot: QtBot, make_shell: MakeShell) -> None:
    """Here the theme, with the keyboard only."""
    shell = make_shell()
    row = page_of(qtbot, shell).rows["theme"]
    box = row.editor.field
    assert isinstance(box, QComboBox)
    assert not row.reset.isVisible()
    box.setFocus()
    qtbot.keyClick(box, Qt.Key.Key_Down)
    assert theme().name == "light"
    qtbot.waitUntil(lambda: stored("theme") == "light")
    assert row.reset.isVisible()
    assert row.reset.accessibleName() == "Reset to default: Theme"
    row.reset.setFocus()
    qtbot.keyClick(row.reset, Qt.Key.Key_Space)
    assert shell.settings.current.theme == "system"
    assert theme().name == "dark"
    assert not row.reset.isVisible()
    assert box.hasFocus()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("night", {"theme"}),  # a word that does not occur on the page
        ("LIGHT", {"theme"}),
        ("gguf folder", {"model_folders"}),
        ("gib nonsense", set()),
    ],
)
def test_the_search_finds_titles_help_choices_and_other_words(
    qtbot: QtBot, make_shell: MakeShell, words: str, found: set[str]
) -> None:
    view = page_of(qtbot, make_shell())
    qtbot.keyClicks(view.search, words)
    assert visible(view) == found
    headings = {name for name, heading in view._headings.items() if heading.isVisible()}
    assert headings == {shown_settings()[name].section for name in found}
    assert view._nothing.isVisible() == (not found)
    qtbot.keyClick(view.search, Qt.Key.Key_Escape)
    assert visible(view) == set(shown_settings())
    qtbot.keyClick(view.search, Qt.Key.Key_Escape)
    assert not view.isVisible()


def test_the_keyboard_reaches_every_setting(qtbot: QtBot, make_shell: MakeShell) -> None:
    view = page_of(qtbot, make_shell())
    fields = {row.editor.field for row in view.rows.values()}
    for _ in range(200):
        qtbot.keyClick(QApplication.focusWidget(), Qt.Key.Key_Tab)
        fields.discard(QApplication.focusWidget())
        if not fields:
            break
    assert not fields


def test_a_typed_text_is_kept_even_when_the_window_closes_at_once(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell()
    text = page_of(qtbot, shell).rows["system_prompt"].editor.field
    assert isinstance(text, QPlainTextEdit)
    qtbot.keyClicks(text, "Be brief.")
    shell.window.close()
    assert json.loads(settings_file().read_text())["system_prompt"] == "Be brief."


def test_a_change_from_elsewhere_is_shown(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    row = page_of(qtbot, shell).rows["system_prompt"]
    shell.keep(replace(shell.settings.current, system_prompt="Be kind."))
    assert isinstance(row.editor.field, QPlainTextEdit)
    assert row.editor.field.toPlainText() == "Be kind."


def test_folders_are_added_and_removed(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shell = make_shell()
    editor = page_of(qtbot, shell).rows["model_folders"].editor
    monkeypatch.setattr(
        "app.window.preferences.editors.QFileDialog.getExistingDirectory", lambda *a: str(tmp_path)
    )
    editor.add.click()
    editor.add.click()  # a second time changes nothing
    assert shell.settings.current.model_folders == (str(tmp_path),)
    assert isinstance(editor.field, QListWidget)
    assert not editor.remove.isEnabled()
    editor.field.setCurrentRow(0)
    editor.remove.click()
    assert shell.settings.current.model_folders == ()


def test_what_waits_for_a_restart_says_so_until_it_is_as_before(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    row = page_of(qtbot, make_shell()).rows["chat_cache_gib"]
    assert isinstance(row.editor.field, QSpinBox)
    assert not row.note.isVisible()
    row.editor.field.setValue(9)
    assert row.note.isVisible()
    assert "restarted" in row.note.text()
    row.editor.field.setValue(Settings().chat_cache_gib)
    assert not row.note.isVisible()


def test_what_waits_for_a_load_says_so(qtbot: QtBot) -> None:
    shown = ShownSetting("Threads", "How many.", "Engine", most=64, takes="next load")
    row = SettingRow("threads", shown, 4)
    qtbot.addWidget(row)
    row.show()
    row.show_value(8, in_use=4)
    assert row.note.isVisible()
    assert "reloaded" in row.note.text()
    row.show_value(8, in_use=8)
    assert not row.note.isVisible()


@pytest.mark.parametrize("kind", [QComboBox, QSpinBox])
def test_the_wheel_scrolls_the_page_and_changes_nothing(
    qtbot: QtBot, make_shell: MakeShell, kind: type[QWidget]
) -> None:
    shell = make_shell()
    fields = page_of(qtbot, shell).findChildren(kind)
    before = shell.settings.current
    assert fields
    for field in fields:
        field.setFocus()
        assert not wheel(field).isAccepted()
    assert shell.settings.current == before


def test_the_page_closes_for_the_chat_and_comes_back(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    view = page_of(qtbot, shell)
    view.left.emit()
    assert not view.isVisible()
    assert shell.window.composer.edit.hasFocus()
    assert page_of(qtbot, shell).isVisible()


def test_a_section_may_have_a_panel_that_is_no_setting(qtbot: QtBot, make_shell: MakeShell) -> None:
    view = page_of(qtbot, make_shell())
    panel = QWidget()
    view.add_panel("Engine", panel, "PyTorch torch")
    assert panel.isVisible()
    view.search.setText("pytorch")
    assert panel.isVisible()
    assert visible(view) == set()
    assert not view._nothing.isVisible()
    view.search.setText("colours")
    assert not panel.isVisible()
