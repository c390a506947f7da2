"""BPE: merges, bytes, and the rules of a vocabulary's kind."""

import re
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.encoders import CUT, PRE_TOKENIZERS, BpeEncoder, PreTokenizer, byte_alphabet
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


@given(st.text("abc", max_size=20))
def test_merging_follows_the_rank_and_of_equals_the_leftmost(text: str) -> None:
    encoder, tokens = encoder_for(MERGES, PRE_TOKENIZERS["qwen2"])
    assert [tokens[i] for i in encoder.encode(text)] == merge_plainly(text, MERGES)


LETTERS_AND_SPACES = st.text(st.sampled_from("abcA1.é漢 \n\t"), max_size=60)


@pytest.mark.parametrize("merge", ["", "ab Ġ", "b Ċ", "Ġa bĠ"])
@pytest.mark.parametrize("name", ["qwen2", "gpt-2", "exaone-moe", "superbpe", "laguna", "tekken"])
@given(text=LETTERS_AND_SPACES)
def test_a_text_has_the_same_tokens_in_parts(name: str, merge: str, text: str) -> None:
    """Also where merges join words: then it stays whole."""
    merges = [*MERGES, "Ġ a", "Ġa b", "Ġa ba", "Ċ Ċ", "b Ġ", "bĠ a"][: None if merge else -2]
    merges += [merge] if merge else []
    encoder, _ = encoder_for(merges, PRE_TOKENIZERS[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.text.encoders.MAX_PIECE", 3)
        parts = [*encoder.parts(text)]
    assert [*chain.from_iterable(parts)] == encoder.encode(text)
    assert not merge or len(parts) == 1


@pytest.mark.parametrize("name", ["gemma4", "sarvam-moe"])
@given(text=LETTERS_AND_SPACES)
def test_a_text_of_a_plain_vocabulary_has_the_same_tokens_in_parts(name: str, text: str) -> None:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = ["▁ a", "▁a b", "a b", "\n \n", "ab a", "▁ ▁", "c a"]
    tokens = [*"abcA1.▁\n", "\n\n\n", *(merge.replace(" ", "") for merge in merges), *bytes_]
    encoder = BpeEncoder({t: i for i, t in enumerate(tokens)}, merges, PRE_TOKENIZERS[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.text.encoders.MAX_PIECE", 3)
        parts = [*encoder.parts(text)]
    assert [*chain.from_iterable(parts)] == encoder.encode(text)
    assert len(parts) > 1 or not CUT.search(text, 3)


def test_of_a_merge_listed_twice_the_first_rank_counts() -> None:
    encoder, tokens = encoder_for(["a b", "b c", "a b"], PRE_TOKENIZERS["qwen2"])
    assert [tokens[i] for i in encoder.encode("abc")] == ["ab", "c"]


def test_every_byte_has_its_own_character() -> None:
    alphabet = byte_alphabet()
    assert [alphabet[char] for char in byte_characters()] == list(range(256))


def test_a_merge_of_what_is_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="zz"):
        BpeEncoder({"a": 0, "b": 1}, ["zz b"], PRE_TOKENIZERS["gpt-2"])


def test_plain_text_bpe_uses_byte_tokens_and_whole_runs_of_newlines() -> None:
    """Gemma 4: spaces as U+2581, <0xXX> for what is missing, "\\n\\n\\n" looked up as it stands."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["a", "▁", "▁a", "\n", "\n\n", "\n\n\n", *bytes_]
    encoder = BpeEncoder(
        {t: i for i, t in enumerate(tokens)}, ["▁ a", "\n \n"], PRE_TOKENIZERS["gemma4"]
    )
    assert encoder.encode("a a\n\n\né") == [0, 2, 5, 6 + 0xC3, 6 + 0xA9]
    assert re.fullmatch("<0xC3>", tokens[6 + 0xC3])


def test_sarvam_merges_newlines_where_gemma_looks_them_up() -> None:
    tokens = ["\n", "\n\n", "\n\n\n", "▁"]
    ids = {token: i for i, token in enumerate(tokens)}
    encoders = {n: BpeEncoder(ids, ["\n \n"], PRE_TOKENIZERS[n]) for n in ("gemma4", "sarvam-moe")}
    assert encoders["gemma4"].encode("\n\n\n ") == [2, 3]
    assert encoders["sarvam-moe"].encode("\n\n\n ") == [1, 0, 3]
