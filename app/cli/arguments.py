"""Options that several subcommands share, except for the load options."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

import engine  # its grammar checker is imported on first use
from app.cli.load_options import text_or_file
from engine import SAMPLERS, EngineError, SamplingParams

SAMPLING_OPTIONS = {
    "temperature": ("--temp", "--temperature"),
    "top_k": ("--top-k",),
    "top_p": ("--top-p",),
    "min_p": ("--min-p",),
    "typical_p": ("--typical",),
    "repeat_penalty": ("--repeat-penalty",),
    "repeat_last_n": ("--repeat-last-n",),
    "frequency_penalty": ("--frequency-penalty",),
    "presence_penalty": ("--presence-penalty",),
    "dry_multiplier": ("--dry-multiplier",),
    "dry_base": ("--dry-base",),
    "dry_allowed_length": ("--dry-allowed-length",),
    "dry_last_n": ("--dry-penalty-last-n",),
    "top_n_sigma": ("--top-nsigma",),
    "xtc_probability": ("--xtc-probability",),
    "xtc_threshold": ("--xtc-threshold",),
    "dynatemp_range": ("--dynatemp-range",),
    "dynatemp_exponent": ("--dynatemp-exp",),
    "mirostat_tau": ("--mirostat-ent",),
    "mirostat_eta": ("--mirostat-lr",),
    "seed": ("--seed", "-s"),
}


def add_model(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    n = "?" if is_optional else None
    parser.add_argument("model", nargs=n, metavar="MODEL", help="a GGUF file, or 'demo'")


def add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the sampling options, with help texts and defaults from `SamplingParams`."""
    group = parser.add_argument_group("sampling")
    specs = {spec.name: spec for spec in fields(SamplingParams)}
    for name, flags in SAMPLING_OPTIONS.items():
        spec = specs[name]
        default = "random" if spec.default is None else spec.default
        text = f"{spec.metadata['help']} (default: {default})".replace("%", "%%")
        group.add_argument(
            *flags, dest=name, type=spec.metadata["kind"], default=spec.default, help=text,
            metavar="X" if spec.metadata["kind"] is float else "N",
        )  # fmt: skip
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop before this text"
    )
    group.add_argument(
        "--ban", action="append", default=[], metavar="TEXT",
        help="never generate this text, regardless of case; repeatable",
    )  # fmt: skip
    group.add_argument(
        "--dry-sequence-breaker", action="append", metavar="TEXT",
        help="text that ends a DRY repetition; replaces the default texts; repeatable",
    )  # fmt: skip
    group.add_argument("--mirostat", action="store_true", help="use Mirostat 2 instead of filters")
    group.add_argument(
        "--logit-bias", action="append", default=[], type=token_bias, metavar="ID=X",
        help="add X to the logit of a token; -inf bans it; repeatable",
    )  # fmt: skip
    group.add_argument(
        "--samplers", type=sampler_names, metavar="LIST",
        help=f"order of the samplers; unlisted ones are disabled (default: {','.join(SAMPLERS)})",
    )  # fmt: skip
    group.add_argument(
        "--ignore-eos", action="store_true", help="keep generating after end-of-text tokens"
    )
    group.add_argument(
        "--on-overflow", choices=("stop", "shift"), default="stop",
        help="what to do when the context is full: stop, or shift, which drops the oldest tokens "
        "(default: stop)",
    )  # fmt: skip
    add_form(parser)


def sampling_params(args: argparse.Namespace, max_tokens: int) -> SamplingParams:
    """Build the sampling parameters from the options.

    Raises:
        EngineError: an option is invalid.
    """
    lists: dict[str, Any] = {
        "dry_breakers": args.dry_sequence_breaker and tuple(args.dry_sequence_breaker),
        "samplers": args.samplers,
    }
    form: dict[str, Any] = given_form(args)
    return SamplingParams(
        max_tokens=max_tokens,
        stop=tuple(args.stop),
        banned_strings=tuple(args.ban),
        ignore_eos=args.ignore_eos,
        on_overflow=args.on_overflow,
        mirostat=args.mirostat,
        logit_bias=tuple(args.logit_bias),
        **{name: getattr(args, name) for name in SAMPLING_OPTIONS},
        **{name: value for name, value in lists.items() if value is not None},
        **form,
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the options for a remote model."""
    group = parser.add_argument_group("remote model")
    group.add_argument(
        "--url", metavar="URL",
        help="use a model on this server instead of a file: `tandem serve` on another machine, for "
        "example http://nas:11435, or any other OpenAI-compatible server",
    )  # fmt: skip
    group.add_argument(
        "--model", dest="remote_model", default="", metavar="NAME",
        help="model on the server (default: its only model)",
    )  # fmt: skip
    group.add_argument(
        "--api-key-file", metavar="FILE",
        help="file whose first line is the server's API key (default: the key saved in the window)",
    )  # fmt: skip


def add_form(parser: argparse.ArgumentParser) -> None:
    """Add the options for structured output."""
    group = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema", default="", metavar="TEXT|@FILE",
        help="generate JSON that matches this schema",
    )  # fmt: skip
    group.add_argument(
        "--grammar", default="", metavar="TEXT|@FILE",
        help="generate text that matches this grammar, in GBNF or Lark",
    )  # fmt: skip
    group.add_argument(
        "--regex", default="", metavar="REGEX",
        help="generate text that matches this regular expression",
    )  # fmt: skip


def given_form(args: argparse.Namespace) -> dict[str, str]:
    """Return the `SamplingParams` fields that the options for structured output set.

    Raises:
        EngineError: a file cannot be read, or the grammar is invalid.
    """
    formats = {
        "json_schema": text_or_file(args.json_schema, "JSON schema"),
        "grammar": text_or_file(args.grammar, "grammar"),
        "regex": args.regex,
    }
    grammar = engine.form_of(**formats)
    if grammar is not None:  # before the model is loaded
        engine.check_grammar(grammar)
    return formats


def token_bias(text: str) -> tuple[int, float]:
    """Parse a bias such as "42=-inf" into a token id and a number.

    Raises:
        EngineError: the syntax is wrong.
    """
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise EngineError(
            "The logit bias '{text}' is not ID=NUMBER.", "Example: --logit-bias 42=-inf", text=text
        ) from None


def sampler_names(text: str) -> tuple[str, ...]:
    """Parse sampler names such as "top_k,temperature"."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
