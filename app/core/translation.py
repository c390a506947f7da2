"""The window's language: English texts in the code, gettext catalogs for other languages.

Texts are translated when they are shown, so module constants stay English until then:

    label(tr("New chat"))
    label(tr("{n} of {total} files").format(n=n, total=total))
    label(tr_n("{n} chat in {folder}", "{n} chats in {folder}", n, folder=folder))
    label(tr("Load", "how busy a device is"))  # in German, the button "Load" is another word
    TITLE = tr_later("Models")  # and label(tr(TITLE)) where it is shown

Errors and other sentences from the engine are templates with values (`engine.Sentence`), which
`translated` looks up; `tests/helpers/templates.py` lists them for the catalogs.
"""

from __future__ import annotations

from gettext import GNUTranslations, NullTranslations
from pathlib import Path
from string import Formatter

from engine import EngineError, Sentence
from engine import reason_of as english_reason

ENGLISH = "en"

_catalog: NullTranslations = NullTranslations()
_code = ENGLISH
_END = "\x04"  # separates a text from its context, as in gettext catalogs


def languages() -> tuple[str, ...]:
    """Return the codes of all available languages, English first."""
    return (ENGLISH, *sorted(path.stem for path in _folder().glob("*.mo")))


def language() -> str:
    """Return the code of the current language."""
    return _code


def use_language(code: str) -> None:
    """Switch to a language such as "de" or "de_AT", or to English if it has no catalog."""
    global _catalog, _code
    code = code.partition("_")[0]
    path = _folder() / f"{code}.mo"
    if not path.is_file():
        _catalog, _code = NullTranslations(), ENGLISH
        return
    with path.open("rb") as file:
        _catalog, _code = GNUTranslations(file), code


def tr(text: str, context: str = "") -> str:
    """Translate a text.

    Args:
        text: the text, or the result of `tr_later`.
        context: distinguishes identical English texts with different meanings; never shown.
    """
    found = _catalog.gettext(tr_later(text, context))
    return english(found) if text else ""  # gettext returns its header for ""


def tr_later(text: str, context: str = "") -> str:
    """Mark a constant for the catalogs; `tr` translates it later."""
    return f"{context}{_END}{text}" if context else text


def english(text: str) -> str:
    """Return the English text of a `tr_later` constant."""
    return text.rpartition(_END)[2]


def tr_n(one: str, many: str, n: int, **values: object) -> str:
    """Return the plural form of a text for `n`, with `{n}` and `values` filled in."""
    return _catalog.ngettext(one, many, n).format(n=n, **values)


def translated(text: str) -> str:
    """Translate a sentence from the engine into the window's language; return other texts as is."""
    if not isinstance(text, Sentence) or _code == ENGLISH:
        return text
    values = {name: _shown(value) for name, value in text.values.items()}
    found = tr(text.template)
    if found == text.template:  # perhaps the clause of a sentence, see `engine.errors.clause`
        found = tr(f"{found}.").removesuffix(".")
    return _Localized().vformat(found, (), values) if values else found


def _shown(value: str | float) -> str | float:
    return translated(value) if isinstance(value, str) else value


def error_text(error: EngineError) -> str:
    """Return an error's message and hint in the window's language."""
    return f"{translated(error.message)} {translated(error.hint)}".strip()


class _Localized(Formatter):
    """Formats fractions with the decimal sign of the window's language."""

    def format_field(self, value: object, format_spec: str) -> str:
        text = str(format(value, format_spec))
        sign = tr("0.5", "shows the decimal sign")[1] if isinstance(value, float) else "."
        return text.replace(".", sign)


SYSTEM_REASONS = (
    tr_later("No such file or directory"), tr_later("Permission denied"),
    tr_later("No space left on device"), tr_later("Read-only file system"),
    tr_later("Input/output error"), tr_later("Is a directory"), tr_later("Not a directory"),
    tr_later("File exists"), tr_later("File name too long"), tr_later("Disk quota exceeded"),
    tr_later("Too many open files"), tr_later("Operation not permitted"),
    tr_later("Transport endpoint is not connected"), tr_later("Stale file handle"),
    tr_later("Invalid argument"), tr_later("File too large"), tr_later("Cannot allocate memory"),
    tr_later("Connection refused"), tr_later("Connection reset by peer"),
    tr_later("Network is unreachable"), tr_later("Exec format error"),
)  # fmt: skip
"""System errors in the C library's words, for the catalogs."""


def reason_of(error: Exception) -> str:
    """Return the reason for an error in the window's language, worded as the end of a sentence."""
    return translated(english_reason(error))


def _folder() -> Path:
    return Path(__file__).resolve().parents[2] / "resources" / "languages"
