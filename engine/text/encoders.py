"""Encoders of text without special tokens: byte-level BPE, and SPM, which merges pieces by score.

BPE splits text into words by regular expressions and merges them by a ranked list; the `tokenizers`
library does the merging. Gemma's BPE (plain text, bytes as <0xXX> tokens) differs only in its
alphabet. SentencePiece merges the adjacent pieces with the highest token score, and repeats; ties
go to the leftmost pair. A merge list cannot represent this: tokens may share a score, and a token
can be reached from parts that no merge rule would name, so pairs are looked up in the vocabulary.

GGUF files only name the pre-tokenizer of a BPE vocabulary (`tokenizer.ggml.pre`). A table here has
the regular expressions (Oniguruma syntax) and other properties for each name. Patterns run one
after the other, each within the pieces that the previous one left; text between matches is a piece
as well. Names and groups are llama.cpp's (`src/llama-vocab.cpp`), except "whitespace", which
requires its own tokenizer. Where llama.cpp's regex engine approximates a model's pattern (upper and
lower case outside ASCII), the model's own pattern is used.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from operator import add

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Chain

from engine.formats.gguf.tensors import quote

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
NEWLINES = r"\s*[\r\n]+"
SPACES = r"\s+(?!\S)|\s+"
PUNCTUATED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"

UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
KANA = r"\x{3040}-\x{309F}\x{30A0}-\x{30FF}"


def one_of(*alternatives: str) -> str:
    """Return a pattern that matches the first fitting alternative."""
    return "|".join(alternatives)


def cased_words(lead: str = r"[^\r\n\p{L}\p{N}]?", ending: str = "") -> str:
    """Return a pattern of words that end before a new capital, as in tekken and o200k."""
    return one_of(f"{lead}{UPPER}*{LOWER}+{ending}", f"{lead}{UPPER}+{LOWER}*{ending}")


def llama3_like(digits: str, word: str = WORD, symbols: str = SYMBOLS) -> str:
    """Return Llama 3's pattern with other rules for digits, words or symbols."""
    return one_of(CONTRACTION, word, digits, symbols, NEWLINES, SPACES)


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = llama3_like(r"\p{N}{1,3}")
QWEN2 = llama3_like(r"\p{N}")
QWEN35 = llama3_like(
    r"\p{N}", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
)
JAIS2 = one_of(
    CONTRACTION, WORD, r"\p{N}{1,3}", SYMBOLS, NEWLINES,
    *(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)", r"\s",
)  # fmt: skip
TEKKEN = one_of(
    cased_words(), r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", NEWLINES, SPACES
)  # fmt: skip
GPT4O = one_of(
    cased_words(ending=CONTRACTION + "?"),
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", NEWLINES, SPACES,
)  # fmt: skip
DEEPSEEK3_WORDS = one_of(
    PUNCTUATED, r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+[\r\n]*", NEWLINES, SPACES
)
DEEPSEEK3 = (r"\p{N}{1,3}", rf"[\x{{4E00}}-\x{{9FA5}}{KANA}]+", DEEPSEEK3_WORDS)
CJK_OLD = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
# cased letters missing in DeepSeek LLM's list of ranges, e.g. Georgian and small Armenian
UNLISTED = (
    r"\x{0560}-\x{0588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2F}\x{A78F}-\x{A7FF}"
    r"\x{AB30}-\x{AB6F}\x{10570}-\x{105BF}\x{10D40}-\x{10D8F}\x{16E40}-\x{16EFF}"
    r"\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DFFF}"
)
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{UNLISTED}]]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"(?<!\s)(?>\s+)$",
    CJK_OLD,
    r"\p{N}+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_OLD, r"\p{N}")
SPARK = (
    *DEEPSEEK3[:2],
    one_of(
        PUNCTUATED, r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+", r"[\r\n]", SPACES
    ),
    r"\p{N}",
)
YOUTU = (
    one_of(
        r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+",
        r"[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}"
        r"\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+",
        r"[\x{3105}-\x{312F}]+",
        rf"[\x{{4E00}}-\x{{9FA5}}{KANA}]+",
    ),
    GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"),
)
HAN_FREE_UPPER = UPPER[:-1] + r"&&[^\p{Han}]]"
HAN_FREE_LOWER = LOWER[:-1] + r"&&[^\p{Han}]]"
KIMI_K2 = one_of(
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{HAN_FREE_UPPER}*{HAN_FREE_LOWER}+{CONTRACTION}?",
    rf"[^\r\n\p{{L}}\p{{N}}]?{HAN_FREE_UPPER}+{HAN_FREE_LOWER}*{CONTRACTION}?",
    r"\p{N}{1,3}", SYMBOLS, NEWLINES, SPACES,
)  # fmt: skip
# Groups of three digits from the right. The model's pattern counts the remaining digits in every
# group, which takes quadratic time; splitting off the one or two on the left gives the same groups.
AFMOE = (
    r"(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})*(?!\p{N}))|\p{N}{3}",
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}" + KANA + r"\x{FF65}-\x{FF9F}"
    r"\x{2F00}-\x{2FDF}\x{0E40}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}"
    r"\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+",
    DEEPSEEK3_WORDS,
)
TINY_AYA = (r"(?<!\d)(?>\d+)\b", r"(?<!\d)\d{1,2}(?=(?:\d{3})*\z)", GPT4O)
SUPERBPE = (r"\p{N}+", r"(?<!\d)\d{1,2}(?=(?:\d{3})+(?!\d))|\d{3}(?=\d)")
CHAMELEON = (
    r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )",
    r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", GPT2,
)  # fmt: skip
BAILING = one_of(
    r"'(?i:[sdmt]|ll|ve|re)", WORD, r"\p{N}", SYMBOLS, r"\s*[\r\n]", SPACES
)  # fmt: skip
SEED_CODER = llama3_like(r"\p{N}", symbols=r" ?[^\s\p{L}\p{N}\r\n]+")
EXAONE_MOE = one_of(
    CONTRACTION, r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", r"\p{N}",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?", r"\s*[\r\n]", r"\s+(?!\S)|\s+",
)  # fmt: skip
BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
LINES = r"[^\n]+|[\n]+"


@dataclass(frozen=True)
class PreTokenizer:
    """The rules and defaults of one kind of vocabulary.

    Args:
        patterns: regular expressions that split text before merging, applied in order.
        clean_spaces: whether decoding drops spaces before punctuation.
        ignore_merges: whether a word that is a token becomes that token regardless of merges.
        add_bos: whether texts begin with BOS unless the file says otherwise.
        forces_bos: whether texts begin with BOS even if the file says otherwise.
        byte_level: whether pieces are spelled in GPT-2's byte alphabet; else in plain text, with
            U+2581 for spaces and <0xXX> tokens for missing characters.
        whole_newlines: whether a run of newlines that is a token always becomes that token.
    """

    patterns: tuple[str, ...]
    clean_spaces: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    forces_bos: bool = False
    byte_level: bool = True
    whole_newlines: bool = False


DEFAULT = PreTokenizer(
    (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), clean_spaces=True
)
PRE_GPT2 = PreTokenizer((GPT2,), clean_spaces=True)
PRE_DIGITS = PreTokenizer((r"\p{N}", GPT2), clean_spaces=True)
PRE_LLAMA3 = PreTokenizer((LLAMA3,), clean_spaces=True)
PRE_LLAMA3_OWN = replace(PRE_LLAMA3, ignore_merges=True, add_bos=True)
PRE_QWEN2 = PreTokenizer((QWEN2,))
PRE_BLOOM = PreTokenizer((BLOOM,), clean_spaces=True)
PRE_GPT4O = PreTokenizer((GPT4O,))
PRE_DEEPSEEK3 = PreTokenizer(DEEPSEEK3)
PRE_BAILING = PreTokenizer((BAILING,))
PRE_GEMMA4 = PreTokenizer(
    (LINES,), clean_spaces=True, add_bos=True, forces_bos=True, byte_level=False,
    whole_newlines=True,
)  # fmt: skip

BY_NAMES: dict[str, PreTokenizer] = {
    "default": DEFAULT,
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": PRE_LLAMA3_OWN,
    "jina-v5-nano": PRE_LLAMA3_OWN,
    "dbrx smaug-bpe glm4 chatglm-bpe": PRE_LLAMA3,
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", llama3_like(r"\p{N}+")), clean_spaces=True, ignore_merges=True
    ),
    "jais-2": PreTokenizer((JAIS2,), clean_spaces=True),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais exaone4": PRE_GPT2,
    "jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code": PRE_GPT2,
    "roberta-bpe modern-bert": PRE_GPT2,
    "trillion granite-docling": replace(PRE_GPT2, clean_spaces=False),
    "starcoder refact codeshell exaone minerva-7b mellum2": PRE_DIGITS,
    "command-r smollm": replace(PRE_DIGITS, clean_spaces=False),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2": PRE_QWEN2,
    "stablelm2 megrez": replace(PRE_QWEN2, clean_spaces=True),
    "qwen35": PreTokenizer((QWEN35,)),
    "ufakzeka": PreTokenizer((QWEN2.removeprefix(CONTRACTION + "|"),)),
    "laguna": PreTokenizer((LINES, QWEN2)),
    "deepseek-llm": PreTokenizer(DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(DEEPSEEK_CODER),
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": PRE_DEEPSEEK3,
    "spark2_5": PreTokenizer(SPARK),
    "youtu": PreTokenizer(YOUTU, ignore_merges=True),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"), True),
    "bloom gpt3-finnish": PRE_BLOOM,
    "poro-chat": replace(PRE_BLOOM, clean_spaces=False),
    "viking": PreTokenizer((BLOOM, r"\p{N}")),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PRE_GPT4O,
    "granite-embed-multi-97m": replace(PRE_GPT4O, ignore_merges=True),
    "tiny_aya cohere2moe": PreTokenizer(TINY_AYA),
    "kimi-k2": PreTokenizer((KIMI_K2,)),
    "superbpe": PreTokenizer(SUPERBPE),
    "bailingmoe bailingmoe2 llada-moe": PRE_BAILING,
    "seed-coder": PreTokenizer((SEED_CODER,)),
    "afmoe": PreTokenizer(AFMOE),
    "exaone-moe": PreTokenizer((EXAONE_MOE,), clean_spaces=True),
    "chameleon": PreTokenizer(CHAMELEON, add_bos=True),
    "gemma4 granite-embed-multi-311m": PRE_GEMMA4,
    "sarvam-moe": PreTokenizer((LINES,), byte_level=False),
}
"""Pre-tokenizers by the names that files use, separated by spaces."""

PRE_TOKENIZERS = {name: kind for names, kind in BY_NAMES.items() for name in names.split()}
"""Pre-tokenizers by `tokenizer.ggml.pre`."""


SPACE = "\u2581"
CACHED_WORD = 64  # maximum length of a cached word, in characters
CACHED_WORDS = 50_000  # maximum number of cached words
PART = 4096  # approximate number of ids per part of a text


class SpmEncoder:
    """Encoder that turns text without special tokens into ids.

    Args:
        ids: id of each token.
        scores: score of each token, by id.
        unk_id: id for a character that is neither a token nor a run of byte tokens; None to drop
            such characters.
    """

    def __init__(self, ids: dict[str, int], scores: Sequence[float], unk_id: int | None) -> None:
        self._ids = ids
        self._scores = scores
        self._unk = [] if unk_id is None else [unk_id]
        self._bytes = [ids.get(f"<0x{byte:02X}>", ids.get(chr(byte))) for byte in range(256)]
        self._inner_pairs: set[str] = set()
        for token in ids:
            self._inner_pairs.update(map(add, token, token[1:]))
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return [*chain.from_iterable(self.parts(text))]

    def parts(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of a text in parts."""
        output: list[int] = []
        for word in self._words(text.replace(" ", SPACE)):
            known = self._cache.get(word)
            output += self._encode_word(word) if known is None else known
            if len(output) >= PART:
                yield output
                output = []
        yield output

    def _words(self, text: str) -> Iterator[str]:
        """Split between characters that are adjacent in no token, because no merge can join
        them."""
        start = 0
        for end, pair in enumerate(map(add, text, text[1:]), start=1):
            if pair not in self._inner_pairs:
                yield text[start:end]
                start = end
        yield text[start:]

    def _encode_word(self, word: str) -> list[int]:
        output: list[int] = []
        for piece in self._merge(word):
            token_id = self._ids.get(piece)
            output += self._spell(piece) if token_id is None else [token_id]
        if len(word) <= CACHED_WORD:
            if len(self._cache) >= CACHED_WORDS:
                self._cache.clear()
            self._cache[word] = output
        return output

    def _merge(self, word: str) -> list[str]:
        pieces: list[str] = list(word)  # "" once merged into the piece on the left
        following = list(range(1, len(pieces) + 1))
        preceding = list(range(-1, len(pieces) - 1))
        queue: list[tuple[float, int, int, str]] = []

        def consider(left: int, right: int) -> None:
            text = pieces[left] + pieces[right]
            token_id = self._ids.get(text)
            if token_id is not None:
                heapq.heappush(queue, (-self._scores[token_id], left, right, text))

        for left, right in pairwise(range(len(pieces))):
            consider(left, right)
        while queue:
            _, left, right, text = heapq.heappop(queue)
            if pieces[left] + pieces[right] != text or not (pieces[left] and pieces[right]):
                continue  # one of the two has already been merged
            pieces[left], pieces[right] = text, ""
            following[left] = after = following[right]
            if after < len(pieces):
                preceding[after] = left
                consider(left, after)
            if preceding[left] >= 0:
                consider(preceding[left], left)
        return [piece for piece in pieces if piece]

    def _spell(self, char: str) -> list[int]:
        spelled = [self._bytes[byte] for byte in char.encode()]
        known = [token_id for token_id in spelled if token_id is not None]
        return known if len(known) == len(spelled) else self._unk


LINE_BREAKS = re.compile(r"(\n+)")

MAX_PIECE = 1 << 14
"""Number of characters after which a text is split for encoding, where possible, because longer
pieces take more time and memory per character."""

CUT = re.compile(r"[A-Za-z](?=[ \n])")
"""End of a piece. No pattern above matches differently if a text ends or starts there: words end
after the letter or, if words contain spaces, no merge joins the characters."""

JOINED = re.compile(r"[A-Za-z][ \n\u2581\u0120\u010a]")
"""Merge result that would make such a split unsafe; the last three characters are spellings of
spaces and newlines."""

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no use for one text at a time


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
    texts = (text for left, right in pairs for text in (left, right, left + right))
    missing = next((text for text in texts if text not in ids), None)
    return ValueError(quote(other) if missing is None else f"{quote(missing)} is not a token")


class BpeEncoder:
    """Encoder that turns text without special tokens into ids.

    Args:
        ids: id of each token.
        merges: merges "left right", by rank.
        pre: pre-tokenizer.

    Raises:
        ValueError: a merge is not a pair of tokens.
    """

    def __init__(self, ids: dict[str, int], merges: list[str], pre: PreTokenizer) -> None:
        self._ids = ids
        self._pre = pre
        pairs = [split_merge(merge) for merge in dict.fromkeys(merges)]
        if not all(map(ids.__contains__, map("".join, pairs))):
            raise _missing(pairs, ids)  # the library panics if one is longer than any token
        try:
            model = BPE(
                ids, pairs, ignore_merges=pre.ignore_merges, byte_fallback=not pre.byte_level
            )
        except Exception as error:  # the library raises only this
            raise _missing(pairs, ids, str(error)) from error
        self._is_cut = JOINED.search("\0".join(map("".join, pairs))) is None
        self._tokenizer = Tokenizer(model)
        cuts = [Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        spelling = [ByteLevel(add_prefix_space=False, use_regex=False)] if pre.byte_level else []
        self._tokenizer.pre_tokenizer = Chain([*cuts, *spelling])

    def parts(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of a text in parts; together they equal the result of `encode`."""
        start = 0
        while self._is_cut and len(text) - start > MAX_PIECE:
            cut = CUT.search(text, start + MAX_PIECE)
            if cut is None:
                break
            yield self.encode(text[start : cut.end()])
            start = cut.end()
        yield self.encode(text[start:] if start else text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, encoded as a whole."""
        if self._pre.byte_level:
            return self._encode_words(text)
        text = text.replace(" ", SPACE)
        if not self._pre.whole_newlines:
            return self._encode_words(text)
        output: list[int] = []
        for part in LINE_BREAKS.split(text):
            # runs of newlines are looked up whole, because merging would produce different tokens
            known = self._ids.get(part) if part.startswith("\n") else None
            output += self._encode_words(part) if known is None else [known]
        return output

    def _encode_words(self, text: str) -> list[int]:
        # unlike the method for one text, this releases the GIL
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids
