"""The language of the window at start."""

from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import QLocale
from PySide6.QtWidgets import QApplication, QDialogButtonBox, QDoubleSpinBox
from pytestqt.qtbot import QtBot

from app.chat.message import AnswerStats
from app.chat.views.answer_view import footer_parts
from app.core.settings import Settings, SettingsStore, parse_settings
from app.core.translation import languages, tr
from app.core.units import GIB, percent_text, rate_text, signed_percent_text, size_text
from app.window.keeper import chosen_language, start_language
from tests.helpers.shell_driver import MakeShell


def desktop_speaks(monkeypatch: pytest.MonkeyPatch, *codes: str) -> None:
    monkeypatch.setattr(QLocale, "uiLanguages", lambda _: list(codes))


@pytest.mark.parametrize(
    ("setting", "desktop", "chosen"),
    [
        ("de", ["en-GB", "en"], "de"),
        ("en", ["de-AT", "de"], "en"),
        ("system", ["de-Latn-AT", "de-AT", "de"], "de"),
        ("system", ["fr-FR", "fr", "de-DE"], "de"),
        ("system", ["en-US", "de-DE"], "en"),
        ("system", ["C"], "en"),
        ("system", [], "en"),
        ("xx", ["de-DE"], "en"),
    ],
)
def test_the_language_is_the_one_that_is_set_or_the_first_of_the_desktop(
    setting: str, desktop: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    desktop_speaks(monkeypatch, *desktop)
    assert chosen_language(setting) == chosen


def test_every_catalog_can_be_chosen() -> None:
    for code in languages():
        assert parse_settings({"language": code}).language == code
    assert parse_settings({"language": "no such"}).language == "system"


def test_qts_own_texts_follow(qapp: QApplication) -> None:
    def cancel() -> str:
        box = QDialogButtonBox(QDialogButtonBox.StandardButton.Cancel)
        return box.buttons()[0].text().replace("&", "")

    start_language(qapp, "de")
    assert (cancel(), tr("Settings")) == ("Abbrechen", "Einstellungen")
    start_language(qapp, "en")
    assert (cancel(), tr("Settings")) == ("Cancel", "Settings")


def test_a_window_starts_in_the_language_that_was_set(make_shell: MakeShell, home: Path) -> None:
    store = SettingsStore(home / "settings.json")
    store.put(replace(Settings(), language="de"))
    assert store.save()
    shell = make_shell()
    shell.settings_page.toggle()
    view = shell.settings_page.view
    assert view is not None
    assert view.search.placeholderText() == "Suchen"


@pytest.mark.parametrize(("code", "sign"), [("de", ","), ("en", ".")])
def test_numbers_have_the_decimal_sign_of_the_language(
    qapp: QApplication, qtbot: QtBot, code: str, sign: str
) -> None:
    """In labels, and in fields, which also parse numbers."""
    start_language(qapp, code)
    try:
        shown = [size_text(13.25 * GIB), percent_text(0.458), rate_text(6.254), rate_text(29650)]
        assert shown == [f"13{sign}2 GiB", f"45{sign}8", f"6{sign}25", "29\u202f650"]
        assert signed_percent_text(0) == f"0{sign}0 %"
        stats = AnswerStats("stop", 212, 48.3, 0.41, 300)
        assert f"48{sign}3 tok/s" in [part.text for part in footer_parts(stats)]
        box = QDoubleSpinBox(value=0.8, decimals=2)
        qtbot.addWidget(box)
        assert box.text() == f"0{sign}80"
        box.selectAll()
        qtbot.keyClicks(box, f"1{sign}25")
        assert box.value() == 1.25
    finally:
        start_language(qapp, "en")
