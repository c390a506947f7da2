"""Rules by which byte-level BPE vocabularies cut text into words, by `tokenizer.ggml.pre`.

A GGUF file only names its rules. This table supplies the regular expressions (Oniguruma syntax) and
the other habits that go with the name. Patterns run one after the other, each inside the pieces
that the one before left; text between matches is a piece too. Names and groups are llama.cpp's
(`src/llama-vocab.cpp`), but for "whitespace", which comes only with a tokenizer of its own. Where
llama.cpp's regex engine approximates a model's pattern (upper and lower case outside ASCII), the
model's own pattern stands here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    """Return a pattern that matches any of the alternatives, the first that fits."""
    return "|".join(alternatives)


def cased_words(lead: str = r"[^\r\n\p{L}\p{N}]?", ending: str = "") -> str:
    """Return a pattern of words that end before a new capital, as tekken and o200k cut them."""
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
# cased letters missing in DeepSeek LLM's list of ranges, such as Georgian and small Armenian
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
# Digits in threes from the right. The model's pattern counts the remaining digits at every third
# one, which takes quadratic time; cutting off the one or two on the left gives the same threes.
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
        patterns: regular expressions that cut text before merging, applied in order.
        clean_spaces: whether decoding drops spaces before punctuation.
        ignore_merges: whether a word that is a token becomes it, whatever the merges say.
        add_bos: whether texts begin with BOS unless the file says otherwise.
        forces_bos: whether texts begin with BOS even if the file says otherwise.
        byte_level: whether pieces are spelled in GPT-2's byte alphabet; else in plain text, with
            U+2581 for spaces and <0xXX> tokens for missing characters.
        whole_newlines: whether a run of newlines that is a token becomes it, whatever the merges
            say.
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
    (LINES,),
    clean_spaces=True,
    add_bos=True,
    forces_bos=True,
    byte_level=False,
    whole_newlines=True,
)

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
"""Each kind of vocabulary with the names that files give it, separated by spaces."""

PRE_TOKENIZERS = {name: kind for names, kind in BY_NAMES.items() for name in names.split()}
"""Each kind of vocabulary by the `tokenizer.ggml.pre` of a file."""
