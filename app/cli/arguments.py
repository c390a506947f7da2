"""Options that several subcommands share, other than those of a load."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

import engine  # what checks grammars is resolved when it is used
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
    """Add the sampling options; help and defaults come from `SamplingParams`."""
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
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text"
    )
    group.add_argument(
        "--ban", action="append", default=[], metavar="TEXT",
        help="never answer with this text, in large or small letters; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--dry-sequence-breaker", action="append", metavar="TEXT",
        help="end repetitions before this text, in place of the default ones",
    )  # fmt: skip
    group.add_argument("--mirostat", action="store_true", help="use Mirostat 2 for all filters")
    group.add_argument(
        "--logit-bias", action="append", default=[], type=token_bias, metavar="ID=X",
        help="add X to the score of a token; -inf forbids it",
    )  # fmt: skip
    group.add_argument(
        "--samplers", type=sampler_names, metavar="LIST",
        help=f"order of the steps; those not named are left out (default: {','.join(SAMPLERS)})",
    )  # fmt: skip
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after the end-of-text token"
    )
    group.add_argument(
        "--on-overflow", choices=("stop", "shift"), default="stop",
        help="when the context is full: stop, or shift: drop the oldest tokens (default: stop)",
    )  # fmt: skip
    add_form(parser)


def sampling_params(args: argparse.Namespace, max_tokens: int) -> SamplingParams:
    """Return the sampling parameters of the sampling options.

    Raises:
        EngineError: the value of an option is invalid.
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
        **{name: given for name, given in lists.items() if given is not None},
        **form,
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model that another machine computes."""
    group = parser.add_argument_group("remote model")
    group.add_argument(
        "--url", metavar="URL",
        help="use a model of this server in place of a file: another machine's `tandem serve`, "
        "such as http://nas:11435, or any other with OpenAI's interface",
    )  # fmt: skip
    group.add_argument(
        "--model", dest="remote_model", default="", metavar="NAME",
        help="the server's model (default: the only one)",
    )  # fmt: skip
    group.add_argument(
        "--api-key-file", metavar="FILE",
        help="file whose first line is the server's API key (default: the key that was entered in "
        "the window)",
    )  # fmt: skip


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


def token_bias(text: str) -> tuple[int, float]:
    """Return the token id and the number in "42=-inf".

    Raises:
        EngineError: it has another form.
    """
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise EngineError(
            f"The bias '{text}' is not ID=NUMBER.", "For example --logit-bias 42=-inf."
        ) from None


def sampler_names(text: str) -> tuple[str, ...]:
    """Return the names in "top_k,temperature"."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
