"""Settings of sampling and of the end of answers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.errors import GrammarError
from engine.util.fields import number, rejected, text, texts, validate_fields

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
        lead: pattern of a mark (see `engine.text.tool_calls.marks`) with which an answer must begin
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


Overflow = Literal["stop", "shift"]
"""Action when the context is full: end the answer, or drop the oldest messages."""

SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip
"""Names of the steps of sampling, in llama.cpp's order; a bias of tokens comes before all."""

MAX_TOKENS = 2**31 - 1
"""Number of tokens that no answer reaches."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of sampling and of the end of answers, with llama.cpp's defaults.

    Raises:
        EngineError: a field is out of bounds or of the wrong kind.
    """

    max_tokens: int = number(
        -1,
        "Max tokens",
        "The answer ends after this many tokens. -1 sets no limit but the context.",
        bounds=(-1, 2**31 - 1),
        soft_max=8192,
        step=1,
        kind=int,
        lowest="no limit",
    )
    temperature: float = number(
        0.8,
        "Temperature",
        "Higher is more varied, lower more predictable. 0 always takes the most likely token.",
        bounds=(0.0, 5.0),
        soft_max=2.0,
        step=0.05,
    )
    top_k: int = number(
        40,
        "Top-k",
        "Only this many of the most likely tokens are considered. 0 considers all.",
        bounds=(0, 2**31 - 1),
        soft_max=200,
        step=1,
        kind=int,
    )
    top_p: float = number(
        0.95,
        "Top-p",
        "Only the most likely tokens that together reach this probability are considered. "
        "1 considers all.",
        bounds=(0.0, 1.0),
        step=0.01,
    )
    min_p: float = number(
        0.05,
        "Min-p",
        "Tokens less likely than this fraction of the most likely one are left out. 0 keeps all.",
        bounds=(0.0, 1.0),
        step=0.01,
    )
    typical_p: float = number(
        1.0,
        "Typical-p",
        "Only tokens about as surprising as expected, up to this probability, are considered. "
        "1 considers all.",
        bounds=(0.0, 1.0),
        step=0.01,
    )
    repeat_penalty: float = number(
        1.0,
        "Repeat penalty",
        "Above 1, tokens that occurred recently become less likely. 1 is neutral.",
        bounds=(0.1, 10.0),
        soft_max=2.0,
        step=0.01,
    )
    repeat_last_n: int = number(
        64,
        "Penalty window",
        "How many recent tokens the three penalties look at. -1 is all of them, 0 none.",
        bounds=(-1, 2**31 - 1),
        soft_max=2048,
        step=1,
        kind=int,
        lowest="all",
    )
    frequency_penalty: float = number(
        0.0,
        "Frequency penalty",
        "Subtracted from a token's score for each time it occurred recently.",
        bounds=(-2.0, 2.0),
        step=0.05,
    )
    presence_penalty: float = number(
        0.0,
        "Presence penalty",
        "Subtracted from a token's score once if it occurred recently.",
        bounds=(-2.0, 2.0),
        step=0.05,
    )
    dry_multiplier: float = number(
        0.0,
        "DRY strength",
        "Above 0, tokens that would go on repeating earlier text become less likely, the more the "
        "longer the repetition. 0 is off, 0.8 is usual.",
        bounds=(0.0, 100.0),
        soft_max=5.0,
        step=0.05,
    )
    dry_base: float = number(
        1.75,
        "DRY growth",
        "Factor by which the DRY penalty grows with each token of a repetition.",
        bounds=(1.0, 10.0),
        soft_max=4.0,
        step=0.05,
    )
    dry_allowed_length: int = number(
        2,
        "DRY allowed length",
        "Repetitions up to this many tokens are not penalised.",
        bounds=(0, 2**31 - 1),
        soft_max=20,
        step=1,
        kind=int,
    )
    dry_last_n: int = number(
        -1,
        "DRY window",
        "In how many recent tokens DRY looks for repetitions. -1 is all of them, 0 none.",
        bounds=(-1, 2**31 - 1),
        soft_max=8192,
        step=1,
        kind=int,
        lowest="all",
    )
    dry_breakers: tuple[str, ...] = texts(
        ("\n", ":", '"', "*"),
        "DRY breakers",
        "A repetition ends before any of these strings, so that names and formats may repeat.",
    )
    top_n_sigma: float = number(
        0.0,
        "Top-n-sigma",
        "Only tokens whose score is within this many standard deviations of the best are "
        "considered. 0 considers all.",
        bounds=(0.0, 100.0),
        soft_max=5.0,
        step=0.05,
    )
    xtc_probability: float = number(
        0.0,
        "XTC probability",
        "How often the most likely tokens are left out, which makes texts less predictable. 0 is "
        "never.",
        bounds=(0.0, 1.0),
        step=0.05,
    )
    xtc_threshold: float = number(
        0.1,
        "XTC threshold",
        "Of all tokens at least this likely, XTC keeps only the least likely one. Above 0.5 it "
        "has no effect.",
        bounds=(0.0, 1.0),
        step=0.01,
    )
    dynatemp_range: float = number(
        0.0,
        "Temperature range",
        "The temperature moves by up to this much: down where the model is sure, up where it is "
        "not. 0 keeps it.",
        bounds=(0.0, 5.0),
        soft_max=2.0,
        step=0.05,
    )
    dynatemp_exponent: float = number(
        1.0,
        "Temperature curve",
        "Above 1, the temperature within its range rises only where the model is very unsure.",
        bounds=(0.01, 10.0),
        soft_max=4.0,
        step=0.05,
    )
    mirostat: bool = field(
        default=False,
        metadata={
            "title": "Mirostat 2",
            "help": "Keeps the surprise of the text constant, in place of all other filters.",
            "kind": bool,
        },
    )
    mirostat_tau: float = number(
        5.0,
        "Mirostat target",
        "Surprise that Mirostat aims at, in bits per token; lower is more focused.",
        bounds=(0.0, 100.0),
        soft_max=10.0,
        step=0.1,
    )
    mirostat_eta: float = number(
        0.1, "Mirostat rate", "How quickly Mirostat corrects itself.", bounds=(0.0, 1.0), step=0.01
    )
    logit_bias: tuple[tuple[int, float], ...] = field(
        default=(),
        metadata={
            "title": "Token bias",
            "help": "Numbers added to the scores of tokens, by token id; -inf forbids a token.",
            "kind": dict,
        },
    )
    samplers: tuple[str, ...] = texts(
        SAMPLERS,
        "Order",
        "Order in which the steps are applied; a step that is not named is left out.",
    )
    seed: int | None = number(
        None,
        "Seed",
        "The same seed gives the same answer again. Without one, each answer uses a new seed.",
        bounds=(0, 2**64 - 1),
        step=1,
        kind=int,
    )
    stop: tuple[str, ...] = texts(
        (), "Stop strings", "The answer ends before any of these strings."
    )
    banned_strings: tuple[str, ...] = texts(
        (),
        "Banned strings",
        "No answer contains any of these strings, in large or small letters: where one comes up, "
        "the answer goes back and continues otherwise.",
        has_lines=True,
    )
    ignore_eos: bool = field(
        default=False,
        metadata={
            "title": "Ignore end-of-text",
            "help": "Continues when the model wants to end, up to the maximum of tokens.",
            "kind": bool,
        },
    )
    json_schema: str = text(
        "JSON schema",
        "The answer is JSON that this schema describes. A model that thinks does so before. "
        "Empty for any answer.",
        is_long=True,
    )
    grammar: str = text(
        "Grammar",
        "The answer has the form that this grammar describes, in GBNF or Lark.",
        is_long=True,
    )
    regex: str = text("Regular expression", "The whole answer matches this regular expression.")
    on_overflow: Overflow = field(
        default="stop",
        metadata={
            "title": "When the context is full",
            "help": "Stop ends the answer; shift drops the oldest messages and continues.",
            "kind": str,
            "choices": ("stop", "shift"),
        },
    )

    def __post_init__(self) -> None:
        schema: Any = self.json_schema
        if isinstance(schema, dict | bool):  # as libraries write them
            object.__setattr__(self, "json_schema", json.dumps(schema))
        validate_fields(self)
        for name in self.samplers:
            if name not in SAMPLERS:
                raise rejected("samplers", f"names among {', '.join(SAMPLERS)}", name)
        if len(set(self.samplers)) < len(self.samplers):
            raise rejected("samplers", "a list without repetitions", self.samplers)

    @property
    def form(self) -> Grammar | None:
        """Form that answers must have; None for any.

        Raises:
            GrammarError: several are asked for.
        """
        return form_of(self.json_schema, self.grammar, self.regex)

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of an answer, a large one where there is no limit."""
        return MAX_TOKENS if self.max_tokens < 0 else self.max_tokens
