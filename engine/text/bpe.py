"""Encodes text with byte-level BPE: words cut by regular expressions, then merged by a ranked list.

The `tokenizers` library does the merging. Gemma's BPE (plain text, bytes as <0xXX> tokens) differs
in its alphabet alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from engine.formats.gguf.tensors import quote
from engine.text.pretokenizers import PreTokenizer
from engine.text.spm import SPACE

NEWLINES = re.compile(r"(\n+)")

PIECE = 1 << 14
"""Number of characters that are encoded at once, if there is a place to cut: longer pieces take
more time for each character, and more memory."""

CUT = re.compile(r"[A-Za-z](?=[ \n])")
"""End of a piece. No pattern of `pretokenizers` matches otherwise where a text ends or begins
there: words end behind the letter, or, where words have spaces, no merge joins the characters."""

JOINED = re.compile(r"[A-Za-z][ \n\u2581\u0120\u010a]")
"""What a merge would have to make for such an end to matter; the last three are spellings."""

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time: threads are no help


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
        self._is_cut = JOINED.search("\0".join(map("".join, pairs))) is None
        self._tokenizer = Tokenizer(model)
        cuts = [Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        spelling = [ByteLevel(add_prefix_space=False, use_regex=False)] if pre.byte_level else []
        self._tokenizer.pre_tokenizer = Sequence([*cuts, *spelling])

    def parts(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of a text, which are the same in parts as at once."""
        start = 0
        while self._is_cut and len(text) - start > PIECE:
            cut = CUT.search(text, start + PIECE)
            if cut is None:
                break
            yield self.encode(text[start : cut.end()])
            start = cut.end()
        yield self.encode(text[start:] if start else text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, encoded at once."""
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
        # unlike the method for one text, this lets other threads run meanwhile
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = found.ids
        return ids
