"""Encodes text with byte-level BPE: words cut by regular expressions, then merged by a ranked list.

The `tokenizers` library does the merging. Gemma's BPE (plain text, bytes as <0xXX> tokens) differs
in its alphabet alone.
"""

from __future__ import annotations

import re

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from engine.gguf.tensors import quote
from engine.text.pretokenizers import PreTokenizer
from engine.text.spm import SPACE

NEWLINES = re.compile(r"(\n+)")


def split_merge(merge: str) -> tuple[str, str]:
    """Return the two tokens of a merge; the space between them is never the first character."""
    cut = merge.find(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for bytes: printable Latin-1 as itself, the others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


def _missing(pairs: list[tuple[str, str]], ids: dict[str, int], other: str = "") -> ValueError:
    """Return an error that names the first text in merges that is not a token.

    Args:
        other: what is wrong if all of them are tokens.
    """
    texts = (text for left, right in pairs for text in (left, right, left + right))
    missing = next((text for text in texts if text not in ids), None)
    return ValueError(quote(other) if missing is None else f"{quote(missing)} is not a token")


class BpeEncoder:
    """Encoder of text without special tokens into ids.

    Args:
        ids: id of each token.
        merges: merges "left right", first those to apply first.
        pre: rules that cut text into words before merging.

    Raises:
        ValueError: a merge is not a pair of tokens.
    """

    def __init__(self, ids: dict[str, int], merges: list[str], pre: PreTokenizer) -> None:
        self._ids = ids
        self._pre = pre
        pairs = [split_merge(merge) for merge in dict.fromkeys(merges)]
        if not all(map(ids.__contains__, map("".join, pairs))):
            raise _missing(pairs, ids)  # the library panics where one is longer than all tokens
        try:
            model = BPE(
                ids, pairs, ignore_merges=pre.ignore_merges, byte_fallback=not pre.byte_level
            )
        except Exception as error:  # the library raises nothing narrower
            raise _missing(pairs, ids, str(error)) from error
        self._tokenizer = Tokenizer(model)
        cuts = [Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        spelling = [ByteLevel(add_prefix_space=False, use_regex=False)] if pre.byte_level else []
        self._tokenizer.pre_tokenizer = Sequence([*cuts, *spelling])

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        if self._pre.byte_level:
            return self._encode_words(text)
        text = text.replace(" ", SPACE)
        if not self._pre.whole_newlines:
            return self._encode_words(text)
        output: list[int] = []
        for part in NEWLINES.split(text):
            # a run of newlines is looked up whole: its merges would give other tokens
            known = self._ids.get(part) if part.startswith("\n") else None
            output += self._encode_words(part) if known is None else [known]
        return output

    def _encode_words(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
