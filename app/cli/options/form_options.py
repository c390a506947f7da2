"""The options that ask for a form of answers."""

from __future__ import annotations

import argparse
from pathlib import Path

import engine  # what checks grammars is resolved when it is used
from engine import EngineError


def add_form(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which form answers must have."""
    group = parser.add_argument_group("form of the answer").add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema", default="", metavar="TEXT|@FILE",
        help="answer with JSON that this schema describes",
    )  # fmt: skip
    group.add_argument(
        "--grammar", default="", metavar="TEXT|@FILE",
        help="answer in the form that this grammar describes, in GBNF or Lark",
    )  # fmt: skip
    group.add_argument(
        "--regex", default="", metavar="REGEX", help="answer with what this expression matches"
    )


def given_form(args: argparse.Namespace) -> dict[str, str]:
    """Return the fields of `SamplingParams` that these options set.

    Raises:
        EngineError: a file cannot be read, or the form cannot be used.
    """
    found = {
        "json_schema": text_or_file(args.json_schema, "JSON schema"),
        "grammar": text_or_file(args.grammar, "grammar"),
        "regex": args.regex,
    }
    form = engine.form_of(**found)
    if form is not None:  # before a model is loaded for it
        engine.check_grammar(form)
    return found


def text_or_file(text: str, what: str) -> str:
    """Return a text, or what the file behind "@" holds.

    Args:
        what: what it is, for the error.

    Raises:
        EngineError: the file cannot be read.
    """
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise EngineError(f"The {what} {text[1:]} cannot be read: {error}.") from None
