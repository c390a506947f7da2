"""Every command that loads a file warns on stderr, never in its result, of what the file lacks."""

import json
from pathlib import Path

import pytest

from tests.helpers.command_line import GREEDY, TEMPLATE, Run
from tests.helpers.tiny_gguf import tiny_gguf

PRE = "tokenizer.ggml.pre"
CUTS = [
    ("from-the-future", "'from-the-future' is unknown"),
    (None, "The file names no pre-tokenizer"),
]


@pytest.mark.parametrize("command", ["generate", "chat", "perplexity"])
@pytest.mark.parametrize(("pre", "problem"), CUTS)
def test_an_unknown_cut_is_noted_on_stderr(
    run: Run, tmp_path: Path, command: str, pre: str | None, problem: str
) -> None:
    model = tiny_gguf(tmp_path / "m.gguf", arch="qwen2", extra={PRE: pre}, chat_template=TEMPLATE)
    text = tmp_path / "text.txt"
    text.write_text("hello world 12 " * 20, encoding="utf-8")
    arguments = {
        "generate": ("-p", "hello", *GREEDY),
        "chat": GREEDY,
        "perplexity": (text, "--ctx", 16),
    }
    outcome = run(command, model, *arguments[command], "--json", stdin="hello\n")
    assert outcome.status == 0
    (warning,) = [line for line in outcome.err.splitlines() if "pre-tokenizer" in line]
    assert problem in warning
    assert "pre-tokenizer" not in outcome.out
    assert json.loads(outcome.out)
