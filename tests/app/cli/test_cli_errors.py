"""Errors are one line on stderr, with an exit status of their own."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from app.__main__ import COMMANDS
from tests.helpers.command_line import Run, assert_refused
from tests.helpers.model_draft import DraftTensor, ModelDraft
from tests.helpers.tiny_gguf import split_gguf

BAD_OPTIONS = [
    (("--split", "3,1"), "2 numbers, but there are 1 devices"),
    (("--split", "many"), "'many' is not a list of numbers"),
    (("--split", ""), "'' is not a list of numbers"),
    (("--split", "0"), "at least one above 0"),
    (("--split=-1",), "at least 0"),
    (("--split", "nan"), "at least 0"),
    (("--split", "inf"), "at least 0"),
    (("--ctx", "-5"), "at least 1, not -5"),
    (("--ctx", "0"), "at least 1, not 0"),
    (("--ctx", "99999999999"), "are needed to load the model"),
    (("--kv-type", "q8_0"), "keys have 16 elements"),
    (("--threads", "0"), "at least 1, not 0"),
    (("--devices", "tpu"), "no device 'tpu'"),
    (("--devices", "cuda:77"), "no device 'cuda:77'"),
    (("--devices", "cpu,"), "no device ''"),
    (("--override", "ffn"), "'ffn' is not REGEX=DEVICE"),
    (("--override", "=cpu"), "'=cpu' is not REGEX=DEVICE"),
    (("--override", "(=cpu"), "'(' is not a regular expression"),
    (("--override", "ffn=tpu"), "no device 'tpu'"),
    (("--override", "ffn=#1"), "names a rank that does not exist"),
    (("--split-mode", "groups", "--groups", "2"), "groups 2 contain 2 ranks, but there are 1"),
    (("--groups", "two"), "'two' are not a list of integers"),
    (("--groups", "1" * 5000), "not a list of integers"),
    (("--split-mode", "groups", "--groups=-1,2"), "at least 1, not -1"),
    (("--n-cpu-moe", "1"), "has no experts"),
    (("--n-cpu-moe", "-1"), "at least 0, not -1"),
    (("--n-cpu-blocks", "-1"), "at least 0, not -1"),
    (("--reserve", "1024"), "'1024' is not DEVICE=MIB"),
    (("--reserve", "cpu=much"), "'cpu=much' is not DEVICE=MIB"),
    (("--reserve", "tpu=1"), "no device 'tpu'"),
    (("--reserve", "cpu=999999999"), "and keep 976562.50 GiB in reserve"),
    (("--control-vector", "nowhere.gguf"), "nowhere.gguf"),
    (("--control-vector", "nowhere.gguf=0.5"), "nowhere.gguf"),
    (("--control-vector", "nowhere.gguf=nan"), "a finite number"),
    (("--control-layers", "3"), "'3' are not FIRST-LAST"),
    (("--control-layers", "3-1"), "a first and a last layer"),
    (("-n", "-2"), "from -1 to"),
    (("--temp", "nan"), "'temperature' must be"),
    (("--top-p", "2"), "'top_p' must be"),
    (("--stop", ""), "'stop' must be"),
    (("--samplers", "top_k,magic"), "'samplers' must be names among"),
    (("--logit-bias", "many"), "'many' is not ID=NUMBER"),
    (("--xtc-probability", "2"), "'xtc_probability' must be"),
    (("--ctx", "4"), "tokens exceeds the available context size of 4"),
]


@pytest.mark.parametrize(("options", "problem"), BAD_OPTIONS, ids=str)
def test_an_option_that_cannot_be_meant_is_one_line(
    run: Run, model: Path, options: Sequence[str], problem: str
) -> None:
    assert_refused(run("generate", model, "-p", "hello", *options), problem)


def test_files_that_are_no_models_are_one_line(
    run: Run, folder: Path, model: Path, vocabulary: Path, foreign: Path
) -> None:
    text = folder / "notes.txt"
    text.write_text("Dear diary,\n" * 50, encoding="utf-8")
    parts = split_gguf(model, 3)
    parts[1].unlink()
    cases = [
        (folder / "absent.gguf", "There is no file"),
        (folder, "is a folder"),
        (text, "does not begin with 'GGUF'"),
        (foreign, "architecture 'mumble', which Tandem cannot run yet"),
        (vocabulary, "contains no model weights"),
        (parts[0], parts[1].name),
        (parts[2], parts[1].name),
    ]
    for path, problem in cases:
        assert_refused(run("generate", path, "-p", "hello"), problem)
        assert_refused(run("plan", path, "--json"), problem)


def test_a_truncated_file_is_one_line_wherever_it_ends(run: Run, folder: Path, model: Path) -> None:
    whole, cut = model.read_bytes(), folder / "cut.gguf"
    for end in (0, 3, 10, 24, 200, 5000, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:end])
        assert_refused(run("generate", cut, "-p", "hello"), "cut.gguf is not a usable GGUF file")
        assert_refused(run("inspect", cut), "cut.gguf is not a usable GGUF file")


def test_prompt_files_that_cannot_be_read_are_one_line(
    run: Run, folder: Path, model: Path, tmp_path: Path
) -> None:
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, problem in [
        (tmp_path / "absent.txt", "No such file"),
        (tmp_path, "Is a directory"),
        (binary, "is not UTF-8 text"),
    ]:
        assert_refused(run("generate", model, "-f", path), f"{path} ")
        assert_refused(run("perplexity", model, path), problem)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in %}", "chat template does not work"),
        ("{{ raise_exception('no\nway') }}", "rejects this conversation: no way"),
    ],
)
def test_a_broken_chat_template_is_one_line(
    run: Run, folder: Path, draft: ModelDraft, template: str, problem: str
) -> None:
    meta = {**draft.meta, "tokenizer.chat_template": template}
    path = ModelDraft(meta, draft.tensors).write(folder / "template.gguf")
    assert_refused(run("generate", path, "-p", "hello"), problem)
    assert run("generate", path, "-p", "hello", "-n", 1, "--raw").status == 0


def test_weights_that_are_no_numbers_are_one_line(
    run: Run, folder: Path, draft: ModelDraft, tmp_path: Path
) -> None:
    shape = draft.tensors["output.weight"].shape
    nan = DraftTensor.of(np.full(shape, np.nan, np.float32))
    path = ModelDraft(draft.meta, {**draft.tensors, "output.weight": nan}).write(
        folder / "nan.gguf"
    )
    text = tmp_path / "text.txt"
    text.write_text("hello the world", encoding="utf-8")
    assert_refused(run("generate", path, "-p", "hello"), "no usable probabilities")
    assert_refused(run("perplexity", path, text, "--json"), "no usable probabilities")


def test_the_demo_is_a_model_where_there_is_one(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.cli.load_options.demo_model", lambda: model)
    assert run("inspect", "demo", "--json").document["path"] == str(model)
    monkeypatch.setattr("app.cli.load_options.demo_model", lambda: None)
    assert_refused(run("generate", "demo", "-p", "hello"), "This installation has no demo model")


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate",),
        ("generate", "m.gguf"),
        ("generate", "m.gguf", "-p", "a", "-f", "b"),
        ("generate", "m.gguf", "-p", "a", "--ctx", "many"),
        ("generate", "m.gguf", "-p", "a", "--kv-type", "q3"),
        ("plan",),
        ("inspect", "m.gguf", "--what"),
        ("perplexity", "m.gguf"),
        ("--what",),
    ],
    ids=" ".join,
)
def test_wrong_usage_has_a_status_of_its_own(run: Run, arguments: Sequence[str]) -> None:
    outcome = run(*arguments)
    assert outcome.status == 2
    assert outcome.out == ""
    assert outcome.err.startswith("usage: tandem")


def test_help_names_every_command_and_no_other(run: Run) -> None:
    outcome = run("--help")
    assert outcome.status == 0
    assert all(f"  {name} " in outcome.out for name in COMMANDS)
    names = {
        "devices",
        "inspect",
        "plan",
        "plans",
        "generate",
        "chat",
        "serve",
        "join",
        "bench",
        "tune",
        "perplexity",
        "tokenize",
        "engine",
    }
    assert set(COMMANDS) == names
    for name in COMMANDS:
        assert run(name, "--help").out.startswith(f"usage: tandem {name}")


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("genrate", "genrate is neither a command nor a file. Did you mean 'tandem generate'?"),
        ("xyz", "xyz is neither a command nor a file. `tandem --help` lists the commands."),
        ("lost.gguf", "There is no file lost.gguf. Check its path."),
        ("./lost", "There is no file ./lost. Check its path."),
    ],
)
def test_a_word_that_is_no_command_opens_no_window(run: Run, word: str, sentence: str) -> None:
    outcome = run(word)
    assert (outcome.status, outcome.out, outcome.err) == (1, "", f"{sentence}\n")


@pytest.mark.skipif(os.name != "posix", reason="Windows deletes no working directory")
def test_a_deleted_working_directory_is_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's MKL would end the process."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert_refused(run("devices"), "The working directory was deleted. Start Tandem from another")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
def test_a_hidden_proc_is_told(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.__main__.PROC_MEMORY", tmp_path / "meminfo")
    assert_refused(run("devices"), "meminfo cannot be read, so this machine's memory is unknown.")
