"""The language that the window starts with: the one that is set, else the desktop's."""

from __future__ import annotations

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
