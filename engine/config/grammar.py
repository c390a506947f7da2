"""The form that an answer must have."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from engine.errors import GrammarError

GrammarKind = Literal["json_schema", "regex", "gbnf", "lark"]
"""Language of a grammar: JSON schema, regular expression, llama.cpp's GBNF, or Lark."""


LARK = re.compile(r"^\s*(?:%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
"""The line by which a grammar in Lark is known: its first rule is called "start"."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an answer, from its first token behind the thinking on.

    Attributes:
        text: the grammar itself, such as the text of a JSON schema.
        trigger: text of the answer behind which it begins, and before which anything may stand;
            "" to begin at once. It begins again wherever the trigger comes again.
        lead: pattern of a mark (see `engine.answer_forms.marks`) with which an answer must begin
            for the grammar to hold from its first token on; any other answer is free. "" for none.
    """

    kind: GrammarKind
    text: str
    trigger: str = ""
    lead: str = ""


def language_of(grammar: str) -> GrammarKind:
    """Return whether a grammar is written in GBNF, whose first rule is "root", or in Lark."""
    return "lark" if LARK.search(grammar) else "gbnf"


def form_of(json_schema: str, grammar: str, regex: str) -> Grammar | None:
    """Return the form that settings ask for, of which one at most is not empty; None for any.

    Raises:
        GrammarError: several are asked for.
    """
    written: dict[GrammarKind, str] = {
        "json_schema": json_schema,
        language_of(grammar): grammar,
        "regex": regex,
    }
    wanted = [Grammar(kind, text) for kind, text in written.items() if text.strip()]
    if len(wanted) > 1:
        raise GrammarError(
            "An answer can have one form: a JSON schema, a grammar or a regular expression.",
            "",
            "Leave the others empty.",
        )
    return wanted[0] if wanted else None
