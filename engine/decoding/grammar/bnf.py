"""Grammars in llama.cpp's GBNF, as llguidance's Lark."""

from __future__ import annotations

import re

from engine.errors import GrammarError

CODE = re.compile(r"\\(\\|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
"""Escape in a literal: a backslash, or a character by its number."""

PLAIN = re.compile(r"[^\x00-\x1f\x7f\"\\/\[\]^-]")
"""Characters that can stand for themselves in a literal and in a class of characters."""

MISSING = re.compile(r"Rule '(.*)' not found|unknown name: \"(.*)\"")


def as_lark(text: str) -> str:
    """Return the Lark grammar that a GBNF grammar means.

    Raises:
        GrammarError: it is not GBNF.
    """
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return gbnf_to_lark(CODE.sub(_character, text))
    except GbnfToLarkError as error:
        place = _place(error.pos.text, error.pos.pos)
        why = str(error).split(" at line ")[0]
        raise GrammarError(f"The grammar cannot be used at {place}: {why}.", place) from None
    except RecursionError:
        raise GrammarError("The grammar is nested too deep.") from None
    except Exception as error:  # noqa: BLE001 the converter has no class of its own for these
        place = place_of_rule(text, str(error))
        at = f" at {place}" if place else ""
        raise GrammarError(f"The grammar cannot be used{at}: {error}.", place) from None


def _character(match: re.Match[str]) -> str:
    """Return the character that an escape stands for, which the converter would spell wrong."""
    number = match[2] or match[3]
    if number is None or int(number, 16) > 0x10FFFF:
        return match[0]
    char = chr(int(number, 16))
    return char if PLAIN.match(char) else f"\\x{ord(char):02x}" if ord(char) < 256 else match[0]


def place_of_rule(text: str, message: str) -> str:
    """Return where a rule that does not exist is named; "" where that is not the problem."""
    missing = MISSING.search(message)
    if missing is None:
        return ""
    found = re.search(rf"(?<![\w-]){re.escape(missing[1] or missing[2])}(?![\w-])", text)
    return _place(text, found.start()) if found else ""


def _place(text: str, at: int) -> str:
    line = text.count("\n", 0, at) + 1
    return f"line {line}, column {at - text.rfind(chr(10), 0, at)}"
