"""Byte-level BPE: cuts, merges, and the names of pre-tokenizers."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

from engine.text.bpe import BpeEncoder, byte_alphabet
from engine.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from tests.helpers.vocabularies import byte_characters

MERGES = ["a b", "b a", "ab a", "a ba", "ab ab", "c a", "ca b"]


def merge_plainly(word: str, merges: list[str]) -> list[str]:
    """Apply the first merge that fits anywhere, at its leftmost place, until none fits."""
    pieces = list(word)
    while True:
        pairs = [
            (merges.index(f"{left} {right}"), i)
            for i, (left, right) in enumerate(pairwise(pieces))
            if f"{left} {right}" in merges
        ]
        if not pairs:
            return pieces
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def encoder_for(merges: list[str], pre: PreTokenizer) -> tuple[BpeEncoder, list[str]]:
    tokens = [*byte_characters(), *dict.fromkeys(merge.replace(" ", "") for merge in merges)]
    return BpeEncoder({t: i for i, t in enumerate(tokens)}, merges, pre), tokens


def cut(text: str, name: str) -> list[str]:
    """The words a named pre-tokenizer sees."""
    splits = [Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].patterns]
    return [word for word, _ in Sequence(splits).pre_tokenize_str(text)]


@given(st.text("abc", max_size=20))
def test_merging_follows_the_rank_and_of_equals_the_leftmost(text: str) -> None:
    encoder, tokens = encoder_for(MERGES, PRE_TOKENIZERS["qwen2"])
    assert [tokens[i] for i in encoder.encode(text)] == merge_plainly(text, MERGES)


def test_of_a_merge_listed_twice_the_first_rank_counts() -> None:
    encoder, tokens = encoder_for(["a b", "b c", "a b"], PRE_TOKENIZERS["qwen2"])
    assert [tokens[i] for i in encoder.encode("abc")] == ["ab", "c"]


def test_every_byte_has_its_own_character() -> None:
    alphabet = byte_alphabet()
    assert [alphabet[char] for char in byte_characters()] == list(range(256))


def test_a_merge_of_what_is_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="zz"):
        BpeEncoder({"a": 0, "b": 1}, ["zz b"], PRE_TOKENIZERS["gpt-2"])


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_named_pattern_cuts_without_losing_text(name: str) -> None:
    """Also shows that the regex engine accepts each pattern."""
    text = "Hello World's 1234567 don'T\r\n\n  x\t…é漢字かな 한국 !!? ǅΩ ( a.b)  "
    assert "".join(cut(text, name)) == text


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "it's 1234  ok", ["it", "'s", " 1234", " ", " ok"]),
        ("llama-bpe", "IT'S 12345  ok", ["IT", "'S", " ", "123", "45", " ", " ok"]),
        ("qwen2", "a12\n\n b", ["a", "1", "2", "\n\n", " b"]),
        ("qwen35", "कि", ["कि"]),
        ("qwen2", "कि", ["क", "ि"]),
        ("deepseek-v3", "x=1234.foo", ["x", "=", "123", "4", ".foo"]),
        ("deepseek-llm", "Ab 12\n", ["Ab", " ", "12", "\n"]),
        ("deepseek-coder", "ab 12", ["ab", " ", "1", "2"]),
        ("starcoder", "ab12", ["ab", "1", "2"]),
        ("falcon", "ab12345", ["ab", "123", "45"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("gpt-4o", "camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
        ("gpt-4o", "ÀÉé", ["ÀÉé"]),
        ("kimi-k2", "abc漢字def", ["abc", "漢字", "def"]),
        ("afmoe", "1234567", ["1", "234", "567"]),
        ("superbpe", "1234567", ["1", "234", "567"]),
        ("tiny_aya", "12345678", ["12", "345", "678"]),
        ("bloom", "a, b", ["a", ",", " b"]),
        ("viking", "a12", ["a", "1", "2"]),
        ("seed-coder", "a;\nb", ["a", ";", "\n", "b"]),
        ("bailingmoe", "I'm;\n\na", ["I", "'m", ";\n\n", "a"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
    ],
)
def test_words_are_cut_as_the_model_family_cuts_them(
    name: str, text: str, words: list[str]
) -> None:
    assert cut(text, name) == words


def test_plain_text_bpe_uses_byte_tokens_and_whole_runs_of_newlines() -> None:
    """Gemma 4: spaces as U+2581, <0xXX> for what is missing, "\\n\\n\\n" looked up as it stands."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["a", "▁", "▁a", "\n", "\n\n", "\n\n\n", *bytes_]
    encoder = BpeEncoder(
        {t: i for i, t in enumerate(tokens)}, ["▁ a", "\n \n"], PRE_TOKENIZERS["gemma4"]
    )
    assert encoder.encode("a a\n\n\né") == [0, 2, 5, 6 + 0xC3, 6 + 0xA9]
    assert re.fullmatch("<0xC3>", tokens[6 + 0xC3])
