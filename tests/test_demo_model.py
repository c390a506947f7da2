"""The bundled demo model: its file, the conversations it learned, and what it answers."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest

from resources.demo.corpus import Corpus, is_held_out

MODEL = Path(__file__).resolve().parents[1] / "resources" / "demo" / "tandem-demo.gguf"
MAX_BYTES = 4_000_000


@cache
def reader() -> gguf.GGUFReader:
    return gguf.GGUFReader(MODEL)


@cache
def corpus() -> Corpus:
    return Corpus()


def value(key: str) -> Any:
    return reader().fields[key].contents()


def test_file_is_small_enough_to_ship() -> None:
    """At most 4 MB, and not a pointer to a file elsewhere."""
    assert 1_000_000 < MODEL.stat().st_size <= MAX_BYTES


def test_metadata_names_model_and_licence() -> None:
    """The window shows these as they stand."""
    assert value("general.architecture") == "llama"
    assert value("general.name") == "Tandem Demo"
    assert value("general.license") == "MIT"
    assert value("general.file_type") == gguf.LlamaFileType.MOSTLY_Q8_0


def test_tokenizer_is_complete() -> None:
    """As many tokens as embedding rows; the ChatML marks are control tokens, and one ends."""
    tokens, kinds = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    control = gguf.TokenType.CONTROL
    marked = {token for token, kind in zip(tokens, kinds, strict=True) if kind == control}
    assert len(tokens) == len(set(tokens)) == value("llama.vocab_size")
    assert marked == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert tokens[value("tokenizer.ggml.eos_token_id")] == "<|im_end|>"
    assert value("tokenizer.ggml.model") == "gpt2"
    assert value("tokenizer.ggml.add_bos_token") is False
    assert all("".join(rule.split(" ")) in tokens for rule in value("tokenizer.ggml.merges"))


def test_chat_template_is_chatml() -> None:
    """The template's marks are the ones that the tokenizer knows."""
    template = value("tokenizer.chat_template")
    assert "<|im_start|>" in template
    assert "<|im_end|>" in template


def test_tensors_match_the_metadata() -> None:
    """Matrices are Q8_0 with the shapes that the header promises, norms are F32."""
    n_embd, n_ff = value("llama.embedding_length"), value("llama.feed_forward_length")
    head_dim = n_embd // value("llama.attention.head_count")
    n_kv = head_dim * value("llama.attention.head_count_kv")
    shapes = {t.name: (t.shape.tolist(), t.tensor_type) for t in reader().tensors}
    q8, f32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32
    for i in range(value("llama.block_count")):
        assert shapes[f"blk.{i}.attn_q.weight"] == ([n_embd, n_embd], q8)
        assert shapes[f"blk.{i}.attn_k.weight"] == ([n_embd, n_kv], q8)
        assert shapes[f"blk.{i}.ffn_down.weight"] == ([n_ff, n_embd], q8)
        assert shapes[f"blk.{i}.attn_norm.weight"] == ([n_embd], f32)
    assert shapes["token_embd.weight"] == ([n_embd, value("llama.vocab_size")], q8)
    assert "output.weight" not in shapes


def test_splitting_it_is_worthwhile() -> None:
    """Several KV heads and feed-forward columns in units of 32, so that uneven splits show."""
    assert value("llama.attention.head_count_kv") >= 4
    assert value("llama.feed_forward_length") % 32 == 0
    assert value("llama.rope.dimension_count") % 32 == 0


def test_every_fact_leads_to_another() -> None:
    """ "Tell me more" always has something to say."""
    facts = corpus().facts
    for fact in facts.values():
        assert fact.more in facts, fact.id
        assert fact.why is None or fact.why in facts, fact.id


def test_every_answer_is_a_whole_ascii_text() -> None:
    """An answer ends like a sentence, a list or a code block does."""
    answers = [a for fact in corpus().facts.values() for a in fact.answers]
    answers += [a for kind in corpus().outside["answers"].values() for a in kind]
    for answer in answers:
        lines = answer.split("\n")
        assert answer.isascii(), answer
        assert answer.endswith((".", "!", "?", "```")) or lines[-1].startswith("- "), answer


def test_no_question_has_two_meanings() -> None:
    """The same wording never asks for two facts."""
    owner: dict[str, str] = {}
    for fact in corpus().facts.values():
        for question in fact.questions:
            key = question.lower().rstrip("?.! ")
            assert owner.setdefault(key, fact.id) == fact.id, question


def test_same_seed_gives_same_conversations() -> None:
    """Training can be repeated."""
    one, other = corpus(), Corpus()
    first = [one.conversation(random.Random(i), 3) for i in range(20)]
    assert first == [other.conversation(random.Random(i), 3) for i in range(20)]
    assert first != [other.conversation(random.Random(i + 1), 3) for i in range(20)]


def test_held_out_wordings_are_never_trained() -> None:
    """The evaluation asks in other words; a fact's first few questions are always trained."""
    seen, held = corpus(), Corpus(held_out=True)
    for fact in seen.facts.values():
        assert not set(seen.questions(fact)) & set(held.questions(fact))
        assert all(is_held_out(q) for q in held.questions(fact))
        assert fact.asks[0] in seen.questions(fact)


@pytest.fixture(scope="module")
def speaker() -> Any:
    """The file's weights in the trainer's own network."""
    pytest.importorskip("torch")
    from resources.demo.evaluate import Speaker

    return Speaker(MODEL)


def say(speaker: Any, *turns: str) -> str:
    """The greedy answer to the last user message; the answers before it are the model's own."""
    from resources.demo.evaluate import greedy

    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": speaker.answers([messages], greedy)[0]})
    return messages[-1]["content"]


@pytest.mark.parametrize(
    ("question", "fact"),
    [
        ("What is tensor parallelism?", "tensor_parallelism"),
        ("What is Tandem?", "tandem"),
        ("Hello", "hello"),
        ("Who are you?", "who_are_you"),
        ("What is a GPU?", "gpu"),
        ("what is quantization", "quantisation"),
        ("What is a GGUF file?", "gguf"),
        ("How do I split a model over two GPUs?", "split_gpus"),
        ("Thanks!", "thanks"),
        ("What is the KV cache?", "kv_cache"),
    ],
)
def test_known_question_gets_its_written_answer(speaker: Any, question: str, fact: str) -> None:
    """Letter for letter, with the weights as they are in the file."""
    assert say(speaker, question) in corpus().facts[fact].answers


@pytest.mark.parametrize(
    "question",
    ["What is the capital of France?", "Write a Python function", "How do I bake bread?"],
)
def test_anything_else_is_declined_with_what_it_is(speaker: Any, question: str) -> None:
    """A whole sentence that names the demo model."""
    answers = [a for kind in corpus().outside["answers"].values() for a in kind]
    assert say(speaker, question) in answers


def test_second_turn_follows_the_first(speaker: Any) -> None:
    """ "Tell me more" is answered with the related fact."""
    facts = corpus().facts
    assert say(speaker, "What is a GPU?", "Tell me more.") in facts[facts["gpu"].more].answers
