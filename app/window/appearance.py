"""The language that the window starts with: the one that is set, else the desktop's."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QCoreApplication, QLibraryInfo, QLocale, QTranslator

from app.core.translation import ENGLISH, languages, use_language

_QT_TEXTS = "qtbase_{code}"


def chosen_language(setting: str) -> str:
    """Return the code of the language to use.

    Args:
        setting: code of a language, or "system" for the first of the desktop's that we have.
    """
    spoken = languages()
    wanted = QLocale.system().uiLanguages() if setting == "system" else [setting]
    codes = (name.partition("-")[0] for name in wanted)
    return next((code for code in codes if code in spoken), ENGLISH)


def start_language(app: QCoreApplication, setting: str) -> None:
    """Show the window's texts, and Qt's own, in the language of a setting.

    To be called before any text is shown: what is shown already keeps its language.
    """
    code = chosen_language(setting)
    use_language(code)
    desktop = QLocale.system()
    # what people type numbers in; the desktop's own forms where it speaks the same language
    QLocale.setDefault(desktop if desktop.name().startswith(code) else QLocale(code))
    for old in app.findChildren(QTranslator):
        app.removeTranslator(old)
        old.deleteLater()
    translator = QTranslator(app)
    folder = QLibraryInfo.path(QLibraryInfo.LibraryPath.TranslationsPath)
    if code != ENGLISH and translator.load(_QT_TEXTS.format(code=code), folder):
        app.installTranslator(translator)


STEPS: Final = (70, 80, 90, 100, 110, 125, 150, 175, 200)
"""Percentages that the keys and the wheel go through; the settings page allows others."""


def next_zoom(percent: int, direction: int) -> int:
    """Return the next zoom in a direction: 1 larger, -1 smaller, 0 back to 100 %."""
    if direction > 0:
        return next((step for step in STEPS if step > percent), STEPS[-1])
    if direction < 0:
        return next((step for step in reversed(STEPS) if step < percent), STEPS[0])
    return 100
