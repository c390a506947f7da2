"""Options of a load: types of the KV cache, threads, how CPUs compute prompts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine  # what checks grammars is resolved when it is used
from app.core.units import MIB
from engine import (
    DEFAULT_DRAFTED,
    DRAFT_KINDS,
    KV_TYPES,
    MMPROJ_KINDS,
    MOST_DRAFTED,
    EngineError,
    KVTypes,
    kv_types,
)

BOTH, OF_KEYS, OF_VALUES = (
    ("--kv-type", "--cache-type"), ("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v")
)  # fmt: skip
"""Names of the options for both types, for that of keys, and for that of values."""


def add_kv_types(group: argparse._ArgumentGroup) -> None:
    """Add the options of a command that loads one model."""
    group.add_argument(*BOTH, choices=KV_TYPES, help="number type of the KV cache (default: f16)")
    group.add_argument(*OF_KEYS, choices=KV_TYPES, help="type of the keys alone")
    group.add_argument(*OF_VALUES, choices=KV_TYPES, help="type of the values alone")


def given_kv_type(args: argparse.Namespace, base: str) -> str:
    """Return the KV type that options ask for; what none of them says is that of `base`."""
    k, v = kv_types(args.kv_type or base)
    return str(KVTypes(args.cache_type_k or k, args.cache_type_v or v))


def add_lists_of_kv_types(add: Callable[[tuple[str, ...], str], Any]) -> None:
    """Add the options of a command that tries several; `add` makes one of names and a help."""
    add(BOTH, f"{', '.join(KV_TYPES)} (default: f16)")
    add(OF_KEYS, "types of the keys alone")
    add(OF_VALUES, "types of the values alone")


def crossed_kv_types(args: argparse.Namespace, base: str) -> Iterator[str]:
    """Yield each KV type that lists of options ask for."""
    for text in args.kv_type or [base]:
        both = kv_types(text)
        for k in args.cache_type_k or [both.k]:
            for v in args.cache_type_v or [both.v]:
                yield str(KVTypes(k, v))


def flags_for(kv_type: str) -> Iterator[tuple[str, str]]:
    """Yield the options, with their values, that ask for a KV type."""
    k, v = kv_types(kv_type)
    if k == v:
        yield BOTH[0], k
    else:
        yield OF_KEYS[1], k
        yield OF_VALUES[1], v


def add_parallel(group: argparse._ArgumentGroup) -> None:
    """Add the option that sets how many requests of full length have room."""
    group.add_argument(
        "--parallel", type=int, metavar="N",
        help="room for N requests of the whole context length at once, or for up to 16 shorter "
        "ones (default: 1; of serve, up to 4 as memory allows)",
    )  # fmt: skip


def add_kept_states(group: argparse._ArgumentGroup) -> None:
    """Add the option that limits the kept states of recurrent layers."""
    group.add_argument(
        "--kept-states", type=kept_states, metavar="MIB",
        help="most host memory for states of recurrent layers that are kept, so that chats go on "
        "where they ended; 0 keeps none (default: up to 4096, and an eighth of what is free)",
    )  # fmt: skip


def kept_states(text: str) -> int:
    """Return the bytes of a number of MiB.

    Raises:
        EngineError: it is something else.
    """
    try:
        n_bytes = round(float(text) * MIB)
    except (ValueError, OverflowError):
        n_bytes = -1
    if n_bytes < 0:
        raise EngineError(f"'{text}' is no amount of memory in MiB.", "For example 1024.")
    return n_bytes


def add_threads(group: argparse._ArgumentGroup) -> None:
    """Add the option that sets the number of threads."""
    group.add_argument(
        "--threads", type=int, metavar="N",
        help="number of CPU threads, all ranks together (default: one per physical core)",
    )  # fmt: skip


def add_fast_prompts(group: argparse._ArgumentGroup) -> None:
    """Add the option that lets CPUs compute long prompts in BF16."""
    group.add_argument(
        "--fast-prompts", action="store_true", default=None,
        help="faster prompts on processors with BF16 units; answers may then differ in their last "
        "digits depending on what else runs",
    )  # fmt: skip


def add_draft(group: argparse._ArgumentGroup) -> None:
    """Add the options of guesses that are checked several at once."""
    group.add_argument(
        "--draft", metavar="|".join((*DRAFT_KINDS, "FILE")),
        help="where guesses of the next tokens come from, of which several are checked at once: "
        "ngram from the text so far, mtp from the block that some models have for it, auto from "
        "both (default; with GPUs from the text alone), off from nowhere; or a GGUF of a smaller "
        "model of the same vocabulary, or of the model's block alone (mtp-*.gguf, found beside the "
        "model), which guesses beside the text; answers stay the same",
    )  # fmt: skip
    group.add_argument(
        "--draft-max", type=int, metavar="N",
        help=f"most guesses that are checked at once, up to {MOST_DRAFTED} "
        f"(default: {DEFAULT_DRAFTED})",
    )  # fmt: skip
    group.add_argument(
        "--draft-vocab", type=int, metavar="N",
        help="let the model's block guess from the first N tokens of the vocabulary alone, the "
        "most frequent: less of the head is read for a guess; answers stay the same (default: all)",
    )  # fmt: skip
    group.add_argument(
        "--mmproj", metavar="|".join((*MMPROJ_KINDS, "FILE")),
        help="GGUF file that encodes pictures for the model: auto is one beside it that fits, "
        "where there is memory for it (default), off none",
    )  # fmt: skip
    group.add_argument(
        "--mmproj-device", metavar="DEVICE",
        help="device that encodes pictures: one of the model's, or cpu (default: the GPU with the "
        "largest share that has room for it)",
    )  # fmt: skip


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
