"""`tokenize` against the tokenizer of the file."""

from pathlib import Path

from engine import load_tokenizer
from tests.helpers.command_line import Run, assert_refused
from tests.helpers.tiny_gguf import tiny_gguf

TEXT = "hello é</s>\n"


def test_each_token_has_its_id_and_its_text(run: Run, model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model)
    found = run("tokenize", model, "-p", TEXT, "--json").document
    assert found["ids"] == tokenizer.encode(TEXT, parse_special=True)
    pieces = [bytes(piece) for piece in found["pieces"]]
    assert pieces == [tokenizer.token_bytes(token) for token in found["ids"]]
    shown = run("tokenize", model, "-p", TEXT)
    lines = [line.split(maxsplit=1) for line in shown.out.splitlines()[1:]]
    assert [int(token) for token, _ in lines] == found["ids"]
    expected = [r"b'\xc3'", r"b'\xa9'", "'</s>'", "' '", r"'\n'"]
    assert [text for _, text in lines][-5:] == expected
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    bare = run("tokenize", model, "-f", file, "--bare", "--plain", "--json").document
    assert bare["ids"] == tokenizer.encode(TEXT, add_special=False)
    assert tokenizer.eos_id not in bare["ids"]


def test_a_file_without_a_vocabulary_is_refused(run: Run, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", tokenizer=False)
    assert_refused(run("tokenize", path, "-p", "hello"), "tokenizer")
