"""Check that a draft model has the vocabulary of the model that it guesses for.

The rule is llama.cpp's (`common/speculative.cpp`): the same kind of tokenizer, the same BOS and
EOS, sizes that differ little, and the same text of each id that both have, but for the first ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.text.tokenizer import has_vocabulary, tokenizer_model
from engine.text.vocabulary import Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile

MOST_OTHER_SIZE = 128
"""Largest difference of the numbers of tokens: padding, or special tokens that were added."""

FIRST_COMPARED = 5
"""First id whose text is compared; those before may be named otherwise, such as `<unk>`."""


def check_vocabulary(draft: GGUFFile, main: GGUFFile) -> None:
    """Check that a file's model can guess for another one.

    Raises:
        EngineError: their vocabularies differ.
        ModelFileError: the draft model's vocabulary contradicts itself.
    """
    if not has_vocabulary(draft.meta) and not has_vocabulary(main.meta):
        return  # sizes are all there is, and guesses beyond them are left out
    found = _difference(draft, main)
    if found:
        raise EngineError(
            f"{draft.path.name} cannot be the draft model of {main.path.name}: {found}.",
            "Choose a smaller model of the same family.",
        )


def _difference(draft: GGUFFile, main: GGUFFile) -> str:
    """Return what differs, as the end of a sentence; "" for nothing."""
    for file in (draft, main):
        if not has_vocabulary(file.meta):
            return f"{file.path.name} has no vocabulary"
    kinds = [tokenizer_model(file.meta) for file in (draft, main)]
    if kinds[0] != kinds[1]:
        return f"its tokenizer is {kinds[0]!r}, not {kinds[1]!r}"
    a, b = (read_vocabulary(file.meta, kinds[0] == "llama") for file in (draft, main))
    for name, ids in (("BOS", (a.bos_id, b.bos_id)), ("EOS", (a.eos_id, b.eos_id))):
        if ids[0] != ids[1]:
            return f"its {name} is {_named(ids[0])}, not {_named(ids[1])}"
    if abs(len(a.tokens) - len(b.tokens)) > MOST_OTHER_SIZE:
        return f"it has {len(a.tokens)} tokens, not {len(b.tokens)}"
    return _other_text(a, b)


def _other_text(a: Vocabulary, b: Vocabulary) -> str:
    """Return which token has another text; "" for none."""
    for token, (one, other) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if token >= FIRST_COMPARED and one != other:
            return f"its token {token} is {one[:40]!r}, not {other[:40]!r}"
    return ""


def _named(token: int | None) -> str:
    return "none" if token is None else f"token {token}"
