"""Cuts of text by named vocabularies: against published expressions, and by hand."""

import time
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import PreTokenizer as Cutter
from tokenizers.pre_tokenizers import Sequence, Split

from engine.text.encoders import CUT, PRE_TOKENIZERS
from tests.helpers.published_cuts import PUBLISHED, published_cut
from tests.helpers.tiers import paired

# what llama.cpp's chain of names (`llama_vocab::impl::load`, October 2026) maps to one cut
SAME_CUT = [
    "default", "minicpm5", "jais-2", "falcon", "qwen35", "ufakzeka", "laguna", "deepseek-llm",
    "deepseek-coder", "spark2_5", "youtu", "viking", "tekken", "kimi-k2", "superbpe", "seed-coder",
    "afmoe", "exaone-moe", "chameleon",
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe "
    "glm4 chatglm-bpe",
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt "
    "jina-v1-en jina-v2-code roberta-bpe olmo jais exaone4 trillion granite-docling",
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2",
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm",
    "bloom gpt3-finnish poro-chat",
    "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m",
    "tiny_aya cohere2moe",
    "bailingmoe bailingmoe2 llada-moe",
    "gemma4 granite-embed-multi-311m sarvam-moe",
]  # fmt: skip
KEEPS_SPACES = (
    "deepseek-llm deepseek-coder deepseek-v3 spark2_5 youtu sarvam-moe command-r qwen2 "
    "deepseek-r1-qwen kormo f2llmv2 qwen35 poro-chat viking tekken smollm chameleon gpt-4o llama4 "
    "kanana2 talkie granite-embed-multi-97m tiny_aya cohere2moe superbpe trillion granite-docling "
    "bailingmoe bailingmoe2 llada-moe seed-coder hunyuan hunyuan-dense hy_v4 joyai-llm kimi-k2 "
    "ufakzeka grok-2 afmoe laguna minimax-m2 solar-open"
)
IGNORES_MERGES = (
    "minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano youtu "
    "tekken granite-embed-multi-97m"
)
ADDS_BOS = (
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken "
    "chameleon gemma4 granite-embed-multi-311m"
)

FRAGMENTS = [
    "'s", "'T", "'re", "'LL", "'ve", "'d", "'ſ", "’s", "1234567", "12345", "1,", "漢字", "かな",
    "カナ", "가나", "ㄱ", "ㄅ", "ა", "ᲐᲑ", "ե", "é", "ǅ", "ΑΒγ", "Ж", "ÀÉ", "!?", "...", "…", "。",
    "：", "！", "“", "<sentinel:3>", "IMGIMGAZ", "🙂", "_", "$", "+", "`", "|", "ʰ", "𝐀", "𐐀", "٣",
    "½", "①", "Ⅷ", "〇", "क", "ि", "ไทย", "ខ្មែរ", "ل", "،", "々", "㐀", "𠀀", "\r\n", "\n\n", "\n",
    "\r", "\t", " ", "  ", "    ", "\u00a0", "\u0085", "\u3000", "\u200b", "\u0301", "e\u0301",
    "\u200d", "\x00", "\x1c",
]  # fmt: skip
# letters whose categories are settled: the two engines know different versions of Unicode
LATIN = st.characters(codec="utf-8", max_codepoint=0x24F)
MIXED = st.lists(st.one_of(st.sampled_from(FRAGMENTS), LATIN), max_size=25).map("".join)


@cache
def cutter(name: str) -> Cutter:
    patterns = PRE_TOKENIZERS[name].patterns
    return Sequence([Split(Regex(pattern), "isolated") for pattern in patterns])


def cut(text: str, name: str) -> list[str]:
    """Return the words that a named pre-tokenizer cuts."""
    return [word for word, _ in cutter(name).pre_tokenize_str(text)]


def names_with(habit: str) -> set[str]:
    return {name for name, pre in PRE_TOKENIZERS.items() if getattr(pre, habit)}


def test_the_names_are_those_that_llama_cpp_knows() -> None:
    assert set(PRE_TOKENIZERS) == {name for names in SAME_CUT for name in names.split()}


def test_names_share_a_cut_where_they_do_in_llama_cpp() -> None:
    for names in SAME_CUT:
        assert len({PRE_TOKENIZERS[name].patterns for name in names.split()}) == 1, names
    n_cuts = len({pre.patterns for pre in PRE_TOKENIZERS.values()})
    assert n_cuts == len(SAME_CUT)


def test_names_imply_the_habits_that_they_do_in_llama_cpp() -> None:
    assert names_with("clean_spaces") == PRE_TOKENIZERS.keys() - set(KEEPS_SPACES.split())
    assert names_with("ignore_merges") == set(IGNORES_MERGES.split())
    assert names_with("add_bos") == set(ADDS_BOS.split())
    plain = {"gemma4", "granite-embed-multi-311m", "sarvam-moe"}
    assert names_with("byte_level") == PRE_TOKENIZERS.keys() - plain
    assert names_with("forces_bos") == names_with("whole_newlines") == plain - {"sarvam-moe"}


def test_every_cut_has_its_published_expressions() -> None:
    assert {PRE_TOKENIZERS[name].patterns for name in PUBLISHED} == {
        pre.patterns for pre in PRE_TOKENIZERS.values()
    }


@pytest.mark.parametrize("name", PUBLISHED)
@given(text=MIXED)
@example("Hello World's 1234567 don'T\r\n\n  x\t…é漢字かな 한국 !!? ǅΩ ( a.b)  ")
def test_any_text_is_cut_as_the_published_expressions_cut_it(name: str, text: str) -> None:
    """By another regex engine, which shares neither code nor spelling of the expressions.

    Engines differ on whether ½ or a joiner belongs to the word before it, which counts where words
    end; models are trained with the engine that Tandem uses, so these are left out.
    """
    if name in ("tiny_aya", "superbpe"):
        text = "".join(c for c in text if c.isdecimal() or not c.isnumeric())
        text = text.replace("\u200c", "").replace("\u200d", "")
    assert cut(text, name) == published_cut(text, name)


@pytest.mark.parametrize("name", PUBLISHED)
@given(
    text=st.lists(st.one_of(st.sampled_from([*FRAGMENTS, "a b", "Z\n", "x "]), LATIN)).map("".join)
)
@example("It's a 12 b\n\n  c  \n d!\n1 e ")
def test_a_text_that_is_cut_behind_a_letter_has_the_same_words(name: str, text: str) -> None:
    """A long text is encoded in pieces. Only where words may have spaces is one cut in two."""
    words = cut(text, name)
    for found in CUT.finditer(text):
        first, second = cut(text[: found.end()], name), cut(text[found.end() :], name)
        joined = [*first[:-1], first[-1] + second[0], *second[1:]]
        assert words == [*first, *second] or words == joined


@pytest.mark.parametrize(
    ("name", "run"), paired(list(PUBLISHED), ["a", " ", "1", "\n", "!", "漢", "\u0301"])
)
def test_long_runs_are_cut_in_linear_time(name: str, run: str) -> None:
    """Whatever follows; as quadratic time, 100 thousand characters would take far longer."""
    start = time.process_time()
    for end in ("x", "7"):
        assert "".join(cut(run * 100_000 + end, name)) == run * 100_000 + end
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("default", "a=12345", ["a", "=", "123", "45"]),
        ("gpt-2", "it's 1234  ok", ["it", "'s", " 1234", " ", " ok"]),
        ("gpt-2", "IT'S\n\nx", ["IT", "'", "S", "\n", "\n", "x"]),
        ("llama-bpe", "IT'S 12345  ok", ["IT", "'S", " ", "123", "45", " ", " ok"]),
        ("minicpm5", "x12345 6", ["x", "123", "45", " ", "6"]),
        ("jais-2", "a" + " " * 7 + "b", ["a", "    ", "  ", " b"]),
        ("llama-bpe", "a" + " " * 7 + "b", ["a", "      ", " b"]),
        ("qwen2", "a12\n\n b", ["a", "1", "2", "\n\n", " b"]),
        ("qwen35", "कि", ["कि"]),
        ("qwen2", "कि", ["क", "ि"]),
        ("ufakzeka", "Ali'de", ["Ali", "'de"]),
        ("qwen2", "Ali'de", ["Ali", "'d", "e"]),
        ("laguna", "a \n b", ["a", " ", "\n", " b"]),
        ("qwen2", "a \n b", ["a", " \n", " b"]),
        ("deepseek-v3", "x=1234.foo", ["x", "=", "123", "4", ".foo"]),
        ("deepseek-v3", "a。\nかな漢", ["a", "。\n", "かな漢"]),
        ("spark2_5", "a。\n漢", ["a", "。", "\n", "漢"]),
        ("deepseek-llm", "Ab 12\n", ["Ab", " ", "12", "\n"]),
        ("deepseek-llm", "Жე1ab", ["Ж", "ე", "1", "ab"]),
        ("deepseek-coder", "ab 12", ["ab", " ", "1", "2"]),
        ("deepseek-coder", "Ж a。1", ["Ж", " a", "。", "1"]),
        ("youtu", "漢a가 ab12", ["漢", "a", "가", " ab", "1", "2"]),
        ("starcoder", "ab12", ["ab", "1", "2"]),
        ("falcon", "ab12345`c", ["ab", "123", "45", "`", "c"]),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"]),
        ("gpt-4o", "camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
        ("gpt-4o", "ÀÉé//\n", ["ÀÉé", "//\n"]),
        ("kimi-k2", "abc漢字def", ["abc", "漢字", "def"]),
        ("gpt-4o", "abc漢字def", ["abc漢字def"]),
        ("afmoe", "1234567", ["1", "234", "567"]),
        ("afmoe", "12345 가나", ["12", "345", " ", "가나"]),
        ("superbpe", "by 1234567 of", ["by ", "1", "234", "567", " of"]),
        ("superbpe", "100²", ["100²"]),
        ("tiny_aya", "12345678", ["12", "345", "678"]),
        ("tiny_aya", "1234x", ["123", "4", "x"]),
        ("tiny_aya", "1234567\u200d", ["1", "234", "567", "\u200d"]),
        ("bloom", "a, b12", ["a", ",", " b12"]),
        ("viking", "a12", ["a", "1", "2"]),
        ("seed-coder", "a;\nb", ["a", ";", "\n", "b"]),
        ("bailingmoe", "I'm;\n\na", ["I", "'m", ";\n\n", "a"]),
        ("exaone-moe", "a b 12", ["a b", " ", "1", "2"]),
        ("chameleon", "a  b12IMGIMGAZc", ["a", "  ", "b", "1", "2", "IMGIMGAZ", "c"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
    ],
)
def test_words_are_cut_as_the_model_family_cuts_them(
    name: str, text: str, words: list[str]
) -> None:
    assert cut(text, name) == words
