"""The form that an answer must have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["json_schema", "regex", "gbnf", "lark"]
"""Language of a grammar: JSON schema, regular expression, llama.cpp's GBNF, or Lark."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an answer, from its first token behind the thinking on.

    Attributes:
        text: the grammar itself, such as the text of a JSON schema.
        trigger: text of the answer behind which it begins, and before which anything may stand;
            "" to begin at once.
    """

    kind: GrammarKind
    text: str
    trigger: str = ""
