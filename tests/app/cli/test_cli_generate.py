"""`generate` and `chat`: texts and their figures."""

import json
from pathlib import Path

import numpy as np
import pytest

from app.cli.talk import Answer
from engine import (
    AnswerRequest,
    ChatMessage,
    Finished,
    Timings,
    Usage,
    inspect_model,
    load_tokenizer,
)
from tests.helpers.command_line import GREEDY, Run, assert_refused
from tests.helpers.control_vector import write_control_vector
from tests.helpers.model_draft import ModelDraft
from tests.helpers.tiny_gguf import tiny_gguf


def test_generate_prints_the_text_and_notes_the_rest_on_stderr(run: Run, model: Path) -> None:
    document = run("generate", model, "-p", "hello", *GREEDY, "--json").document
    human = run("generate", model, "-p", "hello", *GREEDY)
    assert human.status == 0
    assert human.out == document["text"] + "\n"
    assert "8 tokens" in human.err
    assert "length" in human.err


def test_generate_json_has_the_documented_fields(run: Run, model: Path) -> None:
    outcome = run("generate", model, "-p", "hello", *GREEDY, "--json")
    document = outcome.document
    assert list(document) == ["text", "ids", "finish_reason", "usage", "timings", "fallbacks"]
    assert len(document["ids"]) == 8
    assert load_tokenizer(model).decode(document["ids"]) == document["text"]
    assert document["finish_reason"] == "length"
    usage = document["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert {"prompt_per_s", "decode_per_s", "first_token_s"} <= set(document["timings"])
    assert outcome.err == ""


def test_an_answer_has_the_form_that_is_asked_for(run: Run, model: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["hello", "world"]}', encoding="utf-8")
    asked = ("generate", model, "-p", "hello", "--temp", "0")
    assert json.loads(run(*asked, "--json-schema", f"@{schema}").out) in ("hello", "world")
    assert run(*asked, "--grammar", 'root ::= "model"').out == "model\n"
    assert run(*asked, "--grammar", 'start: "the"').out == "the\n"
    wrong = run(*asked, "--json-schema", '{"items": {"type": "foo"}}')
    assert wrong.status == 1
    assert "#/items/type" in wrong.err
    missing = run(*asked, "--grammar", f"@{tmp_path / 'none'}")
    assert missing.status == 1
    assert "cannot be read" in missing.err


SPLITS = [
    ("cpu,cpu", "3,1", "tensor"),
    ("cpu,cpu,cpu", "5,0,1", "tensor"),
    ("cpu,cpu,cpu,cpu,cpu", "1,1,1,1,1", "tensor"),
    ("cpu,cpu", "1/1", "layer"),
]


@pytest.mark.parametrize(("devices", "split", "mode"), SPLITS, ids=str)
def test_the_text_does_not_depend_on_the_split(
    run: Run, model: Path, devices: str, split: str, mode: str
) -> None:
    ask = ("generate", model, "-p", "hello world", *GREEDY, "--kv-type", "f32", "--json")
    alone = run(*ask).document
    many = run(*ask, "--devices", devices, "--split", split, "--split-mode", mode).document
    assert many["text"] == alone["text"]
    assert many["ids"] == alone["ids"]


@pytest.mark.parametrize(
    ("options", "kv_type", "n_bytes"),
    [
        (("--kv-type", "q8_0"), "q8_0", 2 * 34), (("--kv-type", "q4_0"), "q4_0", 2 * 18),
        (("-ctk", "q8_0", "-ctv", "q4_0"), "q8_0/q4_0", 34 + 18),
    ],
)  # fmt: skip
def test_the_cache_may_be_quantised(
    run: Run, tmp_path: Path, options: tuple[str, ...], kv_type: str, n_bytes: int
) -> None:
    """Bytes are as planned, and the text is the same on any split."""
    path = tiny_gguf(tmp_path / "m.gguf", head_dim=32)
    ask = ("generate", path, "-p", "hello world", *GREEDY, *options, "--json")
    alone = run(*ask).document
    assert len(alone["ids"]) == 8
    where = ("--devices", "cpu,cpu", "--split", "3,1")
    assert run(*ask, *where).document["text"] == alone["text"]
    plan = run("plan", path, *where, *options, "--ctx", "500", "--json").document
    assert plan["kv_type"] == kv_type
    n_rows = 2 * 512 * 2  # of 32 elements, in 2 layers, 2 pages, 2 heads; a head per rank
    assert sum(d["kv"] for d in plan["devices"]) == n_rows * n_bytes


def test_the_prompt_goes_through_the_chat_template_unless_raw(run: Run, model: Path) -> None:
    tokenizer = load_tokenizer(model)

    def n_prompt(*options: str) -> int:
        document = run("generate", model, "-p", "hello", "-n", 1, "--json", *options).document
        return int(document["usage"]["prompt_tokens"])

    def length(text: str) -> int:
        return len(tokenizer.encode(text, parse_special=True))

    assert n_prompt("--raw") == length("hello")
    assert n_prompt() == length("<user>hello<assistant>")
    assert n_prompt("--system", "world") == length("<system>world<user>hello<assistant>")


def test_the_prompt_comes_from_a_file_or_stdin_as_well(
    run: Run, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello the world", encoding="utf-8")
    options = (*GREEDY, "--json")
    direct = run("generate", model, "-p", "hello the world", *options).document
    assert run("generate", model, "-f", file, *options).document["ids"] == direct["ids"]
    piped = run("generate", model, "-p", "-", *options, stdin="hello the world").document
    assert piped["ids"] == direct["ids"]


def test_an_empty_prompt_is_a_chat_message_but_no_text_to_complete(
    run: Run, model: Path, folder: Path, draft: ModelDraft
) -> None:
    assert run("generate", model, "-p", "", "-n", 1, "--json").document["usage"]
    meta = {**draft.meta, "tokenizer.ggml.add_bos_token": False}
    bare = ModelDraft(meta, draft.tensors).write(folder / "no-bos.gguf")
    assert_refused(run("generate", bare, "-p", "", "--raw"), "prompt is empty")


def test_a_full_context_ends_the_answer(run: Run, model: Path) -> None:
    ask = ("generate", model, "--raw", "-p", "hello", "-n", 50, "--ignore-eos", "--ctx", 8)
    document = run(*ask, "--json").document
    assert document["finish_reason"] == "context"
    shifted = run(*ask, "--on-overflow", "shift", "--json")
    assert shifted.document["finish_reason"] == "length"
    assert "context full: dropped the oldest" in shifted.err


def test_sampling_options_reach_the_sampler(run: Run, model: Path) -> None:
    ask = ("generate", model, "-p", "hello", "-n", 8, "--ignore-eos", "--json", "--temp", 2)
    first, again = (run(*ask, "--seed", 7).document["ids"] for _ in range(2))
    other = run(*ask, "--seed", 8).document["ids"]
    assert first == again != other
    greedy = run("generate", model, "-p", "hello", *GREEDY, "--json").document["ids"]
    assert run(*ask, "--top-k", 1).document["ids"] == greedy
    text = run("generate", model, "-p", "hello", *GREEDY, "--json").document["text"]
    stopped = run("generate", model, "-p", "hello", *GREEDY, "--stop", text[-1], "--json").document
    assert stopped["finish_reason"] == "stop"
    assert text.startswith(stopped["text"])
    assert text[-1] not in stopped["text"]
    banned = run(
        "generate", model, "-p", "hello", *GREEDY, "--ban", text[-1], "--ban", "zz", "--json"
    )
    assert text[-1].lower() not in banned.document["text"].lower()


def test_parts_can_be_put_on_one_device(run: Run, model: Path) -> None:
    ask = ("generate", model, "-p", "hello", *GREEDY, "--kv-type", "f32", "--json")
    plain = run(*ask).document
    moved = run(*ask, "--devices", "cpu,cpu", "--override", "ffn_.*=cpu").document
    assert moved["ids"] == plain["ids"]


@pytest.mark.parametrize(
    "options",
    [
        ("--split-mode", "groups", "--groups", "1,2"),
        ("--split-mode", "groups", "--split", "0,1,1", "--n-cpu-blocks", "1"),
        ("--override", "attn=#2", "--override", "ffn=#1", "--kv-on-host", "--reserve", "cpu=1"),
    ],
    ids=" ".join,
)
def test_wherever_parts_lie_the_answer_is_the_same(
    run: Run, model: Path, options: tuple[str, ...]
) -> None:
    ask = ("generate", model, "-p", "hello", *GREEDY, "--kv-type", "f32", "--json")
    plain = run(*ask).document
    assert run(*ask, "--devices", "cpu,cpu,cpu", *options).document["ids"] == plain["ids"]


def test_a_control_vector_steers_by_its_scale(run: Run, model: Path, folder: Path) -> None:
    """The library tests the file itself; here it must arrive with its scale and layers."""
    n_embd = inspect_model(model).info.n_embd
    direction = {1: np.random.default_rng(0).normal(size=n_embd).astype(np.float32)}
    vector = write_control_vector(folder / "steer.gguf", direction)
    ask = ("generate", model, "-p", "hello", *GREEDY, "--json")
    plain = run(*ask).document["ids"]
    assert run(*ask, "--control-vector", f"{vector}=100").document["ids"] != plain
    assert run(*ask, "--control-vector", f"{vector}=0").document["ids"] == plain
    unreached = run(*ask, "--control-vector", f"{vector}=100", "--control-layers", "2-3")
    assert unreached.document["ids"] == plain


# ---- chat


def test_chat_remembers_until_it_is_told_to_start_afresh(run: Run, model: Path) -> None:
    typed = "hello\n\nworld\n/new\nhello\n"
    outcome = run("chat", model, *GREEDY, "--json", stdin=typed)
    first, second, fresh = outcome.document["turns"]
    assert [first["prompt"], second["prompt"], fresh["prompt"]] == ["hello", "world", "hello"]
    assert fresh["ids"] == first["ids"]
    assert fresh["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"] + 8
    assert second["usage"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    assert outcome.err == ""


def test_chat_streams_its_answers_to_stdout_alone(run: Run, model: Path) -> None:
    turns = run("chat", model, *GREEDY, "--json", stdin="hello\nworld\n").document["turns"]
    human = run("chat", model, *GREEDY, stdin="hello\nworld")
    assert human.status == 0
    assert human.out == "".join(turn["text"] + "\n\n" for turn in turns)
    assert "Ctrl+D" in human.err


def test_chat_keeps_the_system_prompt(run: Run, model: Path) -> None:
    ask = ("chat", model, *GREEDY, "--json")
    plain = run(*ask, stdin="hello").document["turns"][0]
    asked = run(*ask, "--system", "be brief", stdin="hello\n/new\nhello").document["turns"]
    assert asked[0]["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    assert asked[0]["ids"] == asked[1]["ids"]


def test_an_error_ends_a_turn_but_not_the_chat(run: Run, model: Path) -> None:
    typed = "x" * 600 + "\nhello\n"
    outcome = run("chat", model, *GREEDY, "--json", stdin=typed)
    first, second = outcome.document["turns"]
    assert "exceeds the available context size of 512" in first["error"]
    assert "exceeds the available context size of 512" in outcome.err
    assert second["prompt"] == "hello"
    assert second["usage"]["prompt_tokens"] < 512


def test_chat_does_not_remember_thoughts(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the window, a thought is no part of the conversation."""
    asked: list[AnswerRequest] = []

    def think(model: object, request: AnswerRequest, *, is_silent: bool) -> Answer:
        asked.append(request)
        result = Answer()
        result.text = "<think>hm</think>\n\nYes."
        result.finished = Finished("stop", Usage(), Timings())
        return result

    monkeypatch.setattr("app.cli.chat.answer", think)
    turns = run("chat", model, "--json", stdin="one\ntwo\n").document["turns"]
    assert asked[1].messages[1] == ChatMessage("assistant", "Yes.")
    assert turns[0]["text"] == "<think>hm</think>\n\nYes."


def test_chat_without_input_is_an_empty_one(run: Run, model: Path) -> None:
    assert run("chat", model, "--json").document == {"turns": []}
