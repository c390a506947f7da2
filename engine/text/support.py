"""Finds the kind of tokenizer that a header asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import ModelFileError
from engine.text.pretokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from engine.text.vocabulary import KEY, file_of

if TYPE_CHECKING:
    from engine.formats.gguf.metadata import Metadata

MODELS = ("llama", "gpt2", "gemma4")
"""Supported kinds of tokenizers."""

NO_MODEL = ("", "none", "no_vocab")
"""Names of the kind in files without a tokenizer."""

NO_VOCABULARY = "This file has no vocabulary: it can be measured, but not talked to."
MAX_NAME = 40  # characters of a name to show


def has_vocabulary(meta: Metadata) -> bool:
    """Return whether the file names a tokenizer; without one it still computes logits."""
    return meta.str(KEY + "model", "") not in NO_MODEL


def tokenizer_model(meta: Metadata) -> str:
    """Return the file's kind of tokenizer.

    Raises:
        ModelFileError: it has none, or one of an unsupported kind.
    """
    model, file = meta.str(KEY + "model", ""), file_of(meta)
    if model in NO_MODEL:
        raise ModelFileError(
            file,
            f"{file.name} contains no tokenizer.",
            "Pick a file that was converted with its vocabulary.",
        )
    if model not in MODELS:
        raise ModelFileError(
            file,
            f"{file.name} uses the tokenizer {model[:MAX_NAME]!r}, which Tandem cannot run yet.",
            "Supported are: " + ", ".join(MODELS) + ".",
        )
    return model


def find_pre_tokenizer(meta: Metadata, model: str) -> tuple[str, PreTokenizer, tuple[str, ...]]:
    """Return the name of the file's pre-tokenizer, the one to use, and warnings if these differ."""
    name = "gemma4" if model == "gemma4" else meta.str(KEY + "pre", "")
    if model == "llama" or name in PRE_TOKENIZERS:
        return name, PRE_TOKENIZERS.get(name, DEFAULT), ()
    problem = (
        f"The pre-tokenizer {name[:MAX_NAME]!r} is unknown" if name else "No pre-tokenizer is named"
    )
    warning = f"{problem}: the default one is used, and answers may be worse."
    return name, DEFAULT, (warning,)


def tokenizer_warnings(meta: Metadata) -> tuple[str, ...]:
    """Return warnings about a file's tokenizer, from its name alone; nothing is built."""
    try:
        if not has_vocabulary(meta):
            return (NO_VOCABULARY,)
        return find_pre_tokenizer(meta, tokenizer_model(meta))[2]
    except ModelFileError as error:
        return (error.message,)
