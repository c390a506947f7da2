"""The window's language: English texts in the code, and catalogs of gettext for other languages.

A text is looked up when it is shown, so constants of a module stay English until then:

    label(tr("New chat"))
    label(tr("{n} of {total} files").format(n=n, total=total))
    label(tr_n("{n} chat in {folder}", "{n} chats in {folder}", n, folder=folder))
    label(tr("Load", "how busy a device is"))  # not the same word in German as on a button
    TITLE = tr_later("Models")  # and label(tr(TITLE)) where it is shown
"""

from __future__ import annotations

from gettext import GNUTranslations, NullTranslations
from pathlib import Path

ENGLISH = "en"

_catalog: NullTranslations = NullTranslations()
_code = ENGLISH
_END = "\x04"  # of a text's context, in catalogs of gettext


def languages() -> tuple[str, ...]:
    """Return the codes of all languages that the window speaks, English first."""
    return (ENGLISH, *sorted(path.stem for path in _folder().glob("*.mo")))


def language() -> str:
    """Return the code of the language in use."""
    return _code


def use_language(code: str) -> None:
    """Show texts in a language from now on; in English if there is no catalog of it.

    Args:
        code: language, perhaps with a country: "de", "de_AT".
    """
    global _catalog, _code
    code = code.partition("_")[0]
    path = _folder() / f"{code}.mo"
    if not path.is_file():
        _catalog, _code = NullTranslations(), ENGLISH
        return
    with path.open("rb") as file:
        _catalog, _code = GNUTranslations(file), code


def tr(text: str, context: str = "") -> str:
    """Return an English text in the window's language.

    Args:
        text: the text, or what `tr_later` returned.
        context: what the text is about, where the same English has two meanings; never shown.
    """
    found = _catalog.gettext(tr_later(text, context))
    return english(found) if text else ""  # the empty text names the catalog's header


def tr_later(text: str, context: str = "") -> str:
    """Return a constant that is listed for the catalogs: `tr` looks it up when it is shown."""
    return f"{context}{_END}{text}" if context else text


def english(text: str) -> str:
    """Return a constant of `tr_later` as it is in English."""
    return text.rpartition(_END)[2]


def tr_n(one: str, many: str, n: int, **values: object) -> str:
    """Return the form of a text that goes with `n` things, with `{n}` and `values` filled in."""
    return _catalog.ngettext(one, many, n).format(n=n, **values)


def _folder() -> Path:
    return Path(__file__).resolve().parents[2] / "resources" / "languages"
