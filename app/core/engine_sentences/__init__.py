"""The engine's sentences in the window's language, as far as their forms are known.

The engine is a library and a command line, too, and its sentences are English and made where the
fact is known. So the window knows their forms: what fits one is taken apart and put together in
the catalogue's words. `tests/app/core/engine_sentences` makes them with the engine, and
lists those that stay English. Imports nothing of the app but the catalogue and units.
"""

from string import Formatter

from app.core.translation import ENGLISH, language, tr
from app.core.units import decimal
from engine import Sentence


def translated(text: str) -> str:
    """Return sentences of the engine in the window's language; unknown ones stay English."""
    if language() == ENGLISH or not text:
        return text
    if isinstance(text, Sentence) and (found := tr(text.template)) != text.template:
        values = {name: _value(each) for name, each in text.values.items()}
        return _Localized().vformat(found, (), values)
    from app.core.engine_sentences import translating  # late: an English window does without forms

    return translating.translated(text)


def _value(value: str | float) -> str | float:
    return translated(value) if isinstance(value, Sentence) else value


class _Localized(Formatter):
    """Formats fractions with the decimal sign of the window's language."""

    def format_field(self, value: object, format_spec: str) -> str:
        text = str(format(value, format_spec))
        return decimal(text) if isinstance(value, float) else text


def reason_of(error: Exception) -> str:
    """Return why the system could not do something, as the end of a sentence."""
    why = (isinstance(error, OSError) and error.strerror) or str(error)
    if language() == ENGLISH:
        return why
    from app.core.engine_sentences import translating

    return translating.system_reason(why)
