"""The tokenizer of a file: special tokens, prefixes, decoding, unusable files."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidGGUF, ModelFileError
from engine.text.chat_template import load_tokenizer
from engine.text.tokenizer import Tokenizer
from tests.helpers.vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    bpe,
    gguf_bytes,
    metadata,
    spm,
    tokenizer,
)

SPM = spm(
    {"▁": -5.0, "a": -6.0, "b": -6.0, "▁a": -1.0, "ab": -2.0, "▁ab": -3.0},
    {"<|user|>": CONTROL, "<tool>": USER_DEFINED},
)
BPE = bpe(
    ["a b", "Ġ a", "Ġa b"], {"<|endoftext|>": CONTROL, "<|im_end|>": NORMAL, "<t>": USER_DEFINED}
)
ANY_TEXT = st.text(st.characters(), max_size=40)  # lone surrogates, too
BPE_EOS = {**BPE, "eos_token_id": 259, "bos_token_id": 259}


def ids_of(tok: Tokenizer, *texts: str) -> list[int]:
    known = {tok.token_text(i): i for i in range(tok.n_vocab)}
    return [known[text] for text in texts]


def texts(tok: Tokenizer, ids: list[int]) -> list[str]:
    return [tok.token_text(i) for i in ids]


@pytest.mark.parametrize("values", [SPM, BPE, BPE_EOS], ids=["spm", "bpe", "bpe with eos"])
@given(text=st.text(st.sampled_from("ab <t>|im_end\n"), max_size=60), most=st.integers(0, 20))
def test_a_text_is_encoded_only_as_far_as_is_asked(
    values: dict[str, Any], text: str, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.text.encoders.MAX_PIECE", 3)
        patch.setattr("engine.text.encoders.PART", 3)
        tok = tokenizer(values)
        whole, some = tok.encode(text, parse_special=True), tok.encode(text, True, True, most)
    assert some == whole[: len(some)]
    assert len(some) > most or some == whole
    assert tok.fewest(text) <= len(whole)


def test_the_fewest_tokens_of_a_text_are_known_without_encoding_it() -> None:
    long = bpe(["a b", "ab ab"], {"<|endoftext|>": CONTROL})
    assert tokenizer(long).fewest("x" * 1300) == 100, "the longest is the special one"
    assert tokenizer(SPM).fewest("x" * 1300) == 163
    values = {**BPE, "tokens": [text if text != "é" else "e2" for text in BPE["tokens"]]}
    assert tokenizer(values).fewest("x" * 1300) == 0, "what no token stands for is left out"


@pytest.fixture(scope="module")
def spm_tok() -> Tokenizer:
    return tokenizer(SPM)


@pytest.fixture(scope="module")
def bpe_tok() -> Tokenizer:
    return tokenizer(BPE_EOS)


def test_spm_puts_bos_and_a_space_in_front(spm_tok: Tokenizer) -> None:
    assert texts(spm_tok, spm_tok.encode("ab")) == ["<s>", "▁ab"]
    assert texts(spm_tok, spm_tok.encode("ab", add_special=False)) == ["▁ab"]
    assert spm_tok.encode("") == [1]
    assert spm_tok.encode("", add_special=False) == []


def test_control_tokens_are_read_only_where_asked_for(spm_tok: Tokenizer) -> None:
    assert texts(spm_tok, spm_tok.encode("<|user|>ab", parse_special=True)) == [
        "<s>", "<|user|>", "▁ab",
    ]  # fmt: skip
    assert "<|user|>" not in texts(spm_tok, spm_tok.encode("<|user|>ab"))


def test_user_defined_tokens_are_always_read(spm_tok: Tokenizer, bpe_tok: Tokenizer) -> None:
    assert texts(spm_tok, spm_tok.encode("a<tool>a", add_special=False)) == ["▁a", "<tool>", "▁a"]
    assert texts(bpe_tok, bpe_tok.encode("a<t>b")) == ["a", "<t>", "b"]


def test_plain_text_never_merges_into_a_control_token() -> None:
    """Whatever pieces a vocabulary offers on the way."""
    tok = tokenizer(spm({"<": -1.0, "s": -1.0, ">": -1.0, "<s": -1.0, "s>": -1.0}))
    assert tok.bos_id not in tok.encode("<s>", add_special=False)


def test_longer_special_tokens_are_found_first() -> None:
    tok = tokenizer(spm({"▁": -1.0}, {"<a": CONTROL, "<a><b>": CONTROL, "b>": CONTROL}))
    found = tok.encode("<a><b><a", add_special=False, parse_special=True)
    assert texts(tok, found) == ["<a><b>", "<a"]


def test_phi3_special_tokens_swallow_the_space_after_them() -> None:
    """Known by the model's name only; <s> does not."""
    values = {**SPM, "general.name": "Phi-3 mini"}
    tok = tokenizer(values)
    found = tok.encode("<|user|> \n a<s> a", add_special=False, parse_special=True)
    assert texts(tok, found) == ["<|user|>", "▁a", "<s>", "▁", "▁a"]


def test_add_space_prefix_can_be_switched_off() -> None:
    tok = tokenizer({**SPM, "add_space_prefix": False})
    assert texts(tok, tok.encode("ab", add_special=False)) == ["ab"]
    assert tok.decode(tok.encode(" ab", add_special=False)) == " ab"


def test_spm_decoding_takes_the_added_space_out_again(spm_tok: Tokenizer) -> None:
    ids = spm_tok.encode("ab")
    assert spm_tok.decode(ids) == "<s> ab"
    assert spm_tok.decode(ids, skip_special=True) == "ab"
    assert spm_tok.decode(ids[1:]) == "ab"


@given(ANY_TEXT)
def test_spm_round_trip(text: str) -> None:
    tok = _cached_spm()
    assert tok.decode(tok.encode(text), skip_special=True) == _shown(text)


@given(ANY_TEXT)
def test_bpe_round_trip(text: str) -> None:
    tok = _cached_bpe()
    assert tok.decode(tok.encode(text)) == _shown(text)


@given(st.lists(st.integers(0, 263), max_size=40))
def test_streaming_bpe_equals_decoding_any_ids(ids: list[int]) -> None:
    tok = _cached_bpe()
    for skip in (False, True):
        stream = tok.stream(skip_special=skip)
        assert "".join(map(stream.feed, ids)) + stream.flush() == tok.decode(ids, skip)


@given(st.lists(st.integers(0, 266), max_size=40))
def test_streaming_spm_equals_decoding_but_for_the_first_space(ids: list[int]) -> None:
    tok = _cached_spm()
    stream = tok.stream(skip_special=False)
    streamed = "".join(map(stream.feed, ids)) + stream.flush()
    starts_with_space = bool(ids) and tok.token_bytes(ids[0]).startswith(b" ")
    assert streamed == " " * starts_with_space + tok.decode(ids)


def test_lone_surrogates_become_replacement_characters(bpe_tok: Tokenizer) -> None:
    assert bpe_tok.decode(bpe_tok.encode("a\ud800b")) == "a\ufffdb"
    assert bpe_tok.decode(bpe_tok.encode("\ud83d\udc4b")) == "👋"


def test_llama3_decoding_tidies_spaces_but_its_stream_does_not() -> None:
    tok = tokenizer({**bpe([], {"<e>": CONTROL}, pre="llama-bpe"), "bos_token_id": 256})
    ids = tok.encode("so ? it 's ' x we 'll", add_special=False)
    assert tok.decode(ids) == "so? it's'x we 'll"
    stream = tok.stream()
    assert "".join(map(stream.feed, ids)) == "so ? it 's ' x we 'll"


def test_bos_is_added_by_kind_and_as_the_file_says() -> None:
    assert tokenizer(BPE_EOS).add_bos is False
    assert tokenizer({**BPE_EOS, "pre": "llama-bpe"}).add_bos is True
    assert tokenizer({**BPE_EOS, "pre": "llama-bpe", "add_bos_token": False}).add_bos is False
    assert tokenizer({**SPM, "add_bos_token": False}).encode("", add_special=True) == []
    tok = tokenizer({**SPM, "add_eos_token": True})
    assert texts(tok, tok.encode("ab")) == ["<s>", "▁ab", "</s>"]


def test_a_wanted_bos_that_does_not_exist_is_left_out_and_said() -> None:
    tok = tokenizer({**BPE, "add_bos_token": True})
    assert tok.bos_id is None
    assert texts(tok, tok.encode("ab")) == ["ab"]
    assert any("BOS" in warning for warning in tok.warnings)


def test_ignore_merges_takes_a_whole_word_that_is_a_token() -> None:
    """Llama 3 has words that no merge makes."""
    values: dict[str, Any] = bpe(["a b"], {"xyz": NORMAL, "<e>": CONTROL})
    whole = tokenizer({**values, "pre": "llama-bpe", "bos_token_id": 258})
    assert texts(whole, whole.encode("xyz", add_special=False)) == ["xyz"]
    merged = tokenizer({**values, "pre": "qwen2"})
    assert texts(merged, merged.encode("xyz")) == ["x", "y", "z"]


def test_an_unknown_pre_tokenizer_is_replaced_and_said() -> None:
    tok = tokenizer({**BPE_EOS, "pre": "from-the-future"})
    assert tok.pre == "from-the-future"
    assert "from-the-future" in tok.warnings[0]
    assert tok.decode(tok.encode("ab 12 x")) == "ab 12 x"
    missing = {key: value for key, value in BPE_EOS.items() if key != "pre"}
    assert len(tokenizer(missing).warnings) == 1
    assert tokenizer(BPE_EOS).warnings == ()


def test_gemma_s_cut_puts_bos_first_whatever_the_file_says() -> None:
    """Files of the kind "gpt2" with the name of a cut like Gemma's too."""
    values = {**BPE_EOS, "add_bos_token": False}
    for pre in ("gemma4", "granite-embed-multi-311m"):
        assert tokenizer({**values, "pre": pre}).add_bos, pre
    assert not tokenizer({**values, "pre": "sarvam-moe"}).add_bos


def test_generation_ends_at_well_known_names_and_given_ids() -> None:
    tok = tokenizer({**BPE_EOS, "eot_token_id": 5})
    assert tok.eog_ids == {5, *ids_of(tok, "<|endoftext|>", "<|im_end|>")}
    assert tok.is_control(ids_of(tok, "<|im_end|>")[0])
    assert not tok.is_control(0)


@pytest.mark.parametrize("ends", ["<|return|> <|call|>", "<|flush|> <|calls|>"])
def test_an_end_that_separates_inside_answers_does_not_end_them(ends: str) -> None:
    """gpt-oss and Solar: <|end|> closes a part of an answer, another token the answer."""
    last, call = ends.split()
    tok = tokenizer(bpe([], dict.fromkeys(["<|end|>", last, call, "<|channel|>"], CONTROL)))
    assert tok.eog_ids == set(ids_of(tok, last, call))
    stream = tok.stream(skip_special=True)
    shown = "".join(map(stream.feed, ids_of(tok, "<|channel|>", "<|end|>", last)))
    assert shown == "<|channel|><|end|>"


def test_a_vocabulary_without_bytes_uses_its_unknown_token() -> None:
    tok = tokenizer(spm({"▁": -1.0, "a": -1.0}, byte_tokens=False))
    assert texts(tok, tok.encode("aéa", add_special=False)) == ["▁", "a", "<unk>", "a"]
    assert tok.decode(tok.encode("aéa"), skip_special=True) == "aa"


def test_pieces_of_every_kind() -> None:
    tok = tokenizer(spm({"▁a": -1.0}, {"<z>": UNUSED, "▁u": USER_DEFINED, "<0xZZ>": BYTE}))
    assert tok.token_bytes(3 + 0xE9) == b"\xe9"
    pieces = [tok.token_bytes(i) for i in ids_of(tok, "▁a", "<z>", "▁u", "<0xZZ>", "<s>")]
    assert pieces == [b" a", b"", "▁u".encode(), b"", b"<s>"]
    assert tok.token_bytes(tok.n_vocab + 7) == b""
    assert tok.decode([tok.n_vocab + 7]) == ""


def test_characters_outside_the_byte_alphabet_stand_for_themselves() -> None:
    tok = tokenizer(bpe([], {"漢Ġ": NORMAL}))
    assert tok.decode([256]) == "漢 "


def test_special_ids_beyond_the_vocabulary_are_ignored_and_said() -> None:
    tok = tokenizer({**SPM, "eos_token_id": 4_000_000})
    assert tok.eos_id == 2
    assert "4000000" in tok.warnings[0]


def test_empty_tokens_get_a_name() -> None:
    """As some converters leave them; several must not count as duplicates."""
    tok = tokenizer(spm({"": -1.0}, {"x": NORMAL}))
    assert tok.token_text(3 + 256) == "[EMPTY_259]"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "none"}, "contains no tokenizer"),
        ({"model": "no_vocab"}, "contains no tokenizer"),
        ({"model": "t5"}, "uses the tokenizer 't5'"),
        ({"tokens": []}, "has no tokens"),
        ({"tokens": ["a", "b", "a"]}, "'a' twice"),
        ({"tokens": ["a", "b" * 4097]}, "a token of 4097 characters"),
        ({"token_type": [1, 1]}, "only 2 token types"),
        ({"scores": [0.5]}, "only 1 scores"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens"),
        ({"token_type": "abc"}, "tokenizer.ggml.token_type"),
        ({"model": "gpt2"}, "without merges"),
        ({"model": "gpt2", "merges": ["qq ww"]}, "its merges do not match its tokens"),
        ({"model": "gpt2", "merges": ["q"]}, "its merges do not match its tokens"),
        ({"model": "gpt2", "merges": [""]}, "its merges do not match its tokens"),
        # longer than any token, with which the library panics
        ({"model": "gpt2", "merges": ["<|user|> a"]}, r"'<\|user\|>a' is not a token"),
        ({"model": "gpt2", "merges": ["a \x1b[2J"]}, r"'\\x1b\[2J' is not a token"),
    ],
)
def test_metadata_that_cannot_serve_is_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelFileError, match=sentence):
        tokenizer({**SPM, **changes})


def test_no_tokenizer_keys_at_all_is_said() -> None:
    with pytest.raises(ModelFileError, match="contains no tokenizer"):
        Tokenizer.from_metadata(metadata({}))


def test_a_file_with_only_a_vocabulary_loads(tmp_path: Path) -> None:
    path = tmp_path / "vocab.gguf"
    path.write_bytes(gguf_bytes({"general.architecture": "llama", **SPM}))
    assert load_tokenizer(path).n_vocab == len(SPM["tokens"])


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("not a model")
    with pytest.raises(InvalidGGUF):
        load_tokenizer(path)


def _shown(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _cached_spm() -> Tokenizer:
    return _CACHE.setdefault("spm", tokenizer(SPM))


def _cached_bpe() -> Tokenizer:
    return _CACHE.setdefault("bpe", tokenizer(BPE_EOS))


_CACHE: dict[str, Tokenizer] = {}
