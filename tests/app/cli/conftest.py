"""Fixtures that run commands in this process, on small models."""

import io
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from app.__main__ import COMMANDS, main
from tests.helpers.command_line import TEMPLATE, Outcome, Run
from tests.helpers.model_draft import ModelDraft
from tests.helpers.tiny_gguf import tiny_gguf

for _, module in COMMANDS.values():  # later ones would keep what a test has patched in `engine`
    import_module(f"app.cli.{module}")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the files that commands write out of the user's folders."""
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def no_left_overs() -> Iterator[None]:
    """Fail a test after which a rank's thread lives on: a command must close its model.

    The thread that compiles a template ends by itself, which nobody waits for.
    """
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name == "tandem-template":
            thread.join(5)
    assert set(threading.enumerate()) <= before


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs `tandem` in this process."""

    def call(*arguments: object, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        return Outcome(status, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """Write a small model with a chat template."""
    return tiny_gguf(folder / "chat.gguf", n_head_kv=4, n_ctx=512, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def draft(model: Path) -> ModelDraft:
    return ModelDraft.read(model)


@pytest.fixture(scope="module")
def vocabulary(folder: Path, draft: ModelDraft) -> Path:
    return ModelDraft(draft.meta, {}).write(folder / "vocabulary.gguf")


@pytest.fixture(scope="module")
def foreign(folder: Path, draft: ModelDraft) -> Path:
    """Write a file of an unknown architecture."""
    meta = {key.replace("llama.", "mumble."): value for key, value in draft.meta.items()}
    meta["general.architecture"] = "mumble"
    return ModelDraft(meta, draft.tensors).write(folder / "foreign.gguf")
