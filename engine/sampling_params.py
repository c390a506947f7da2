"""Settings for sampling and for when answers end."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.errors import GrammarError, Sentence
from engine.util.fields import number, rejected, text, texts, validate_fields

GrammarKind = Literal["json_schema", "regex", "gbnf", "lark"]
"""Language of a grammar: JSON schema, regular expression, llama.cpp's GBNF, or Lark."""

LARK = re.compile(r"^\s*(?:%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
"""Line that identifies a Lark grammar, whose first rule is called "start"."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar for structured output, which applies from the first token after the thinking.

    Attributes:
        text: the grammar itself, for example a JSON schema.
        trigger: text in the answer after which the grammar applies, each time it occurs; text
            before it is free. "" to apply immediately.
        lead: pattern of a mark (see `engine.text.tool_calls.marks`); the grammar applies, from the
            first token, only to answers that start with this mark. "" if there is none.
    """

    kind: GrammarKind
    text: str
    trigger: str = ""
    lead: str = ""


def language_of(grammar: str) -> GrammarKind:
    """Return whether a grammar is written in Lark or in GBNF, whose first rule is "root"."""
    return "lark" if LARK.search(grammar) else "gbnf"


def form_of(json_schema: str, grammar: str, regex: str) -> Grammar | None:
    """Return the grammar from the settings, at most one of which may be set; None if none is.

    Raises:
        GrammarError: several of the settings are set.
    """
    written: dict[GrammarKind, str] = {
        "json_schema": json_schema,
        language_of(grammar): grammar,
        "regex": regex,
    }
    grammars = [Grammar(kind, text) for kind, text in written.items() if text.strip()]
    if len(grammars) > 1:
        raise GrammarError(
            "An answer can be constrained by only one of these: a JSON schema, a grammar or a"
            " regular expression.",
            "",
            "Leave the others empty.",
        )
    return grammars[0] if grammars else None


Overflow = Literal["stop", "shift"]
"""Action when the context is full: end the answer, or drop the oldest messages."""

SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip
"""Names of the sampling steps, in llama.cpp's order; token biases come before all of them."""

MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings for sampling and for when answers end, with llama.cpp's defaults.

    Raises:
        EngineError: a field is out of bounds or has the wrong type.
    """

    max_tokens: int = number(
        -1, "Max tokens",
        "The answer ends after this many tokens. -1 means no limit except the context.",
        bounds=(-1, MAX_TOKENS), soft_max=8192, step=1, kind=int, lowest="no limit",
    )  # fmt: skip
    temperature: float = number(
        0.8, "Temperature",
        "Higher is more varied, lower is more predictable. 0 always takes the most likely token.",
        bounds=(0.0, 5.0), soft_max=2.0, step=0.05,
    )  # fmt: skip
    top_k: int = number(
        40, "Top-k", "Only this many of the most likely tokens are considered. 0 considers all.",
        bounds=(0, MAX_TOKENS), soft_max=200, step=1, kind=int,
    )  # fmt: skip
    top_p: float = number(
        0.95, "Top-p",
        "Only the most likely tokens that together reach this probability are considered. "
        "1 considers all.",
        bounds=(0.0, 1.0), step=0.01,
    )  # fmt: skip
    min_p: float = number(
        0.05, "Min-p",
        "Tokens less likely than this fraction of the most likely one are left out. 0 keeps all.",
        bounds=(0.0, 1.0), step=0.01,
    )  # fmt: skip
    typical_p: float = number(
        1.0, "Typical-p",
        "Only tokens about as surprising as expected, up to this probability, are considered. "
        "1 considers all.",
        bounds=(0.0, 1.0), step=0.01,
    )  # fmt: skip
    repeat_penalty: float = number(
        1.0, "Repeat penalty",
        "Above 1, tokens that occurred recently become less likely. 1 is neutral.",
        bounds=(0.1, 10.0), soft_max=2.0, step=0.01,
    )  # fmt: skip
    repeat_last_n: int = number(
        64, "Penalty window",
        "Number of recent tokens that the three penalties consider. -1 means all, 0 none.",
        bounds=(-1, MAX_TOKENS), soft_max=2048, step=1, kind=int, lowest="all",
    )  # fmt: skip
    frequency_penalty: float = number(
        0.0, "Frequency penalty",
        "Subtracted from a token's score for each time it occurred recently.",
        bounds=(-2.0, 2.0), step=0.05,
    )  # fmt: skip
    presence_penalty: float = number(
        0.0, "Presence penalty", "Subtracted from a token's score once if it occurred recently.",
        bounds=(-2.0, 2.0), step=0.05,
    )  # fmt: skip
    dry_multiplier: float = number(
        0.0, "DRY strength",
        "Above 0, tokens that would extend a repetition of earlier text become less likely, more so"
        " the longer it is. 0 is off, 0.8 is common.",
        bounds=(0.0, 100.0), soft_max=5.0, step=0.05,
    )  # fmt: skip
    dry_base: float = number(
        1.75, "DRY growth",
        "Factor by which the DRY penalty grows with each token of a repetition.",
        bounds=(1.0, 10.0), soft_max=4.0, step=0.05,
    )  # fmt: skip
    dry_allowed_length: int = number(
        2, "DRY allowed length", "Repetitions up to this many tokens are not penalised.",
        bounds=(0, MAX_TOKENS), soft_max=20, step=1, kind=int,
    )  # fmt: skip
    dry_last_n: int = number(
        -1, "DRY window",
        "Number of recent tokens that DRY searches for repetitions. -1 means all, 0 none.",
        bounds=(-1, MAX_TOKENS), soft_max=8192, step=1, kind=int, lowest="all",
    )  # fmt: skip
    dry_breakers: tuple[str, ...] = texts(
        ("\n", ":", '"', "*"), "DRY breakers",
        "A repetition ends before any of these strings, so that names and formats may repeat.",
    )  # fmt: skip
    top_n_sigma: float = number(
        0.0, "Top-n-sigma",
        "Only tokens with a score within this many standard deviations of the best are "
        "considered. 0 considers all.",
        bounds=(0.0, 100.0), soft_max=5.0, step=0.05,
    )  # fmt: skip
    xtc_probability: float = number(
        0.0, "XTC probability",
        "How often the most likely tokens are left out, which makes text less predictable. 0 means"
        " never.",
        bounds=(0.0, 1.0), step=0.05,
    )  # fmt: skip
    xtc_threshold: float = number(
        0.1, "XTC threshold",
        "Of all tokens at least this likely, XTC keeps only the least likely one. Above 0.5 it "
        "has no effect.",
        bounds=(0.0, 1.0), step=0.01,
    )  # fmt: skip
    dynatemp_range: float = number(
        0.0, "Temperature range",
        "The temperature varies by up to this much: lower where the model is confident, higher "
        "where it is not. 0 keeps it fixed.",
        bounds=(0.0, 5.0), soft_max=2.0, step=0.05,
    )  # fmt: skip
    dynatemp_exponent: float = number(
        1.0, "Temperature curve",
        "Above 1, the temperature rises within its range only where the model is very uncertain.",
        bounds=(0.01, 10.0), soft_max=4.0, step=0.05,
    )  # fmt: skip
    mirostat: bool = field(
        default=False,
        metadata={
            "title": "Mirostat 2",
            "help": "Keeps the surprise of the text constant, in place of all other filters.",
            "kind": bool,
        },
    )
    mirostat_tau: float = number(
        5.0, "Mirostat target",
        "Surprise that Mirostat aims at, in bits per token; lower is more focused.",
        bounds=(0.0, 100.0), soft_max=10.0, step=0.1,
    )  # fmt: skip
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
        SAMPLERS, "Order", "Order of the sampling steps; steps that are not listed are skipped."
    )
    seed: int | None = number(
        None, "Seed",
        "The same seed gives the same answer again. If none is set, each answer uses a new seed.",
        bounds=(0, 2**64 - 1), step=1, kind=int,
    )  # fmt: skip
    stop: tuple[str, ...] = texts(
        (), "Stop strings", "The answer ends before any of these strings."
    )
    banned_strings: tuple[str, ...] = texts(
        (), "Banned strings",
        "No answer contains any of these strings, in upper or lower case: if one appears, the "
        "answer is rolled back and continues differently.",
        has_lines=True,
    )  # fmt: skip
    ignore_eos: bool = field(
        default=False,
        metadata={
            "title": "Ignore end-of-text",
            "help": "Continues after the model's end-of-text token, until Max tokens is reached.",
            "kind": bool,
        },
    )
    json_schema: str = text(
        "JSON schema",
        "The answer is JSON that matches this schema; thinking comes before it. Leave empty for any"
        " answer.",
        is_long=True,
    )
    grammar: str = text(
        "Grammar", "The answer matches this grammar, in GBNF or Lark.", is_long=True
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
        if isinstance(schema, dict | bool):  # libraries pass parsed JSON
            object.__setattr__(self, "json_schema", json.dumps(schema))
        validate_fields(self)
        for name in self.samplers:
            if name not in SAMPLERS:
                names = Sentence("names among {names}", names=", ".join(SAMPLERS))
                raise rejected("samplers", names, name)
        if len(set(self.samplers)) < len(self.samplers):
            expected = Sentence("a list without repetitions")
            raise rejected("samplers", expected, self.samplers)

    @property
    def form(self) -> Grammar | None:
        """Grammar for structured output; None if there is none. Raises GrammarError if several."""
        return form_of(self.json_schema, self.grammar, self.regex)

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens in an answer; a large number if there is no limit."""
        return MAX_TOKENS if self.max_tokens < 0 else self.max_tokens
