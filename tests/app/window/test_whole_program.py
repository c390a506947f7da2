"""The window with the real engine and the bundled model: the main use, and failures.

The engine is in another process, as in `tandem`; the main use is also tested on a thread.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot
from torch import Tensor

from app.core.engine_client import EngineState
from app.core.paths import demo_model
from app.main import Shell
from app.widgets.theme import apply_theme
from engine import LoadParams, ProcessHost, SamplingParams, ThreadHost
from tests.helpers.faults import Fault, quicken
from tests.helpers.shell_driver import ask, banner, shown
from tests.helpers.tiny_gguf import split_gguf, tiny_gguf

WAIT_MS = 30_000


ON_A_THREAD = pytest.mark.parametrize("shell", [ThreadHost], indirect=True, ids=["thread"])
"""Mark of tests that change the engine's internals."""

ON_BOTH = pytest.mark.parametrize(
    "shell", [ProcessHost, ThreadHost], indirect=True, ids=["process", "thread"]
)

ON_A_PROCESS = pytest.mark.parametrize(
    "shell",
    [ProcessHost, pytest.param(ThreadHost, marks=pytest.mark.slow)],
    indirect=True,
    ids=["process", "thread"],
)
"""Mark of tests in which only the process can leave something behind."""


@pytest.fixture
def shell(request: pytest.FixtureRequest, qapp: QApplication, qtbot: QtBot) -> Iterator[Shell]:
    before = set(threading.enumerate())  # other tests have their own servers
    made = Shell(qapp, getattr(request, "param", ProcessHost))
    made.start()
    greedy = SamplingParams(temperature=0)
    made.window.sampling.set_params(greedy)
    yield made
    made.window.close()
    new = set(threading.enumerate()) - before
    names = [t.name for t in new if t.name.startswith("tandem")]
    assert names == [], "the engine leaves nothing behind"
    made.window.deleteLater()
    made.deleteLater()
    apply_theme(qapp, "dark")


@pytest.fixture
def loaded(shell: Shell, qtbot: QtBot) -> Shell:
    path = demo_model()
    assert path is not None, "the bundled model is part of the program"
    with qtbot.waitSignal(shell.client.loaded, timeout=WAIT_MS):
        shell.models.open(str(path))
    return shell


def truncated(folder: Path) -> Path:
    path = tiny_gguf(folder / "truncated.gguf")
    path.write_bytes(path.read_bytes()[:-5000])
    return path


def text_file(folder: Path) -> Path:
    path = folder / "notes.gguf"
    path.write_text("not a model", encoding="utf-8")
    return path


def unknown_architecture(folder: Path) -> Path:
    return tiny_gguf(folder / "strange.gguf", arch="strange")


def missing_shard(folder: Path) -> Path:
    parts = split_gguf(tiny_gguf(folder / "whole.gguf"), 3)
    parts[1].unlink()
    return parts[0]


@ON_BOTH
def test_the_demo_answers_over_one_and_over_three_ranks_alike(loaded: Shell, qtbot: QtBot) -> None:
    ask(qtbot, loaded, "What is tensor parallelism?")
    question, alone = shown(loaded)
    assert question == "What is tensor parallelism?"
    assert "devices" in alone
    assert alone.endswith(".")

    assert loaded.client.model is not None
    path = loaded.client.model.info.path
    with qtbot.waitSignal(loaded.client.loaded, timeout=WAIT_MS):
        loaded.client.load(LoadParams(path, ("cpu",) * 3, (3, 2, 1)))
    loaded.session.new_chat("")
    ask(qtbot, loaded, "What is tensor parallelism?")
    assert shown(loaded)[1] == alone


WRONG_FILES: dict[str, Callable[[Path], Path]] = {
    "truncated": truncated,
    "does not begin with 'GGUF'": text_file,
    "architecture 'strange'": unknown_architecture,
    "cannot be found": missing_shard,
    "There is no file": lambda folder: folder / "gone.gguf",
}
"""Writers of files that cannot be loaded, by their error messages."""


def test_a_wrong_file_is_a_sentence_and_the_model_stays(
    loaded: Shell, qtbot: QtBot, tmp_path: Path
) -> None:
    for said, make in WRONG_FILES.items():
        loaded.models.open(str(make(tmp_path)))
        qtbot.waitUntil(lambda said=said: said in banner(loaded), timeout=WAIT_MS)  # type: ignore[misc]
        qtbot.waitUntil(lambda: loaded.client.state is EngineState.READY, timeout=WAIT_MS)
        loaded.chat_presenter.new_chat()
        ask(qtbot, loaded, "Hello")
        assert shown(loaded)[1], "the previous model answers"


def endless(shell: Shell) -> None:
    shell.window.sampling.set_params(
        SamplingParams(max_tokens=100_000, ignore_eos=True, on_overflow="shift")
    )


@ON_BOTH
def test_ejecting_while_it_answers_keeps_what_was_said(loaded: Shell, qtbot: QtBot) -> None:
    endless(loaded)
    loaded.chat_presenter.send("Hello")
    qtbot.waitUntil(lambda: len(shown(loaded)) == 2 and len(shown(loaded)[1]) > 50, timeout=WAIT_MS)
    with qtbot.waitSignal(loaded.client.unloaded, timeout=WAIT_MS):
        loaded.models.eject()
    assert loaded.client.state is EngineState.EMPTY
    assert not loaded.session.is_busy
    assert len(shown(loaded)[1]) > 50


def test_stopping_and_closing_take_effect_at_once(loaded: Shell, qtbot: QtBot) -> None:
    """A stopped answer ends soon; a window closed during the next one leaves nothing behind."""
    endless(loaded)
    loaded.chat_presenter.send("Hello")
    qtbot.waitUntil(lambda: len(shown(loaded)) == 2 and len(shown(loaded)[1]) > 50, timeout=WAIT_MS)
    with qtbot.waitSignal(loaded.client.finished, timeout=500) as end:
        loaded.session.stop()
    assert end.args[0].reason == "cancelled"
    loaded.chat_presenter.send("Hello again")
    qtbot.waitUntil(lambda: len(shown(loaded)) == 4 and len(shown(loaded)[3]) > 50, timeout=WAIT_MS)
    loaded.window.close()
    assert loaded.client.state is EngineState.CLOSED


@ON_A_PROCESS
def test_closing_in_the_middle_of_a_load_leaves_nothing_behind(
    shell: Shell, qtbot: QtBot, tmp_path: Path
) -> None:
    """The model is large enough that its load takes a while; it ends at the next chunk."""
    path = tiny_gguf(tmp_path / "large.gguf", n_layer=8, n_embd=1024, n_head=16, n_ff=4096)
    with qtbot.waitSignal(shell.client.load_progress, timeout=WAIT_MS):
        shell.models.open(str(path))
    shell.window.close()
    assert shell.client.state is EngineState.CLOSED


@ON_A_THREAD
@pytest.mark.parametrize("again", ["the same", "another split"])
def test_a_device_that_hangs_is_named_and_the_conversation_goes_on(
    loaded: Shell, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    assert loaded.client.model is not None
    path, wake = loaded.client.model.info.path, threading.Event()
    with qtbot.waitSignal(loaded.client.loaded, timeout=WAIT_MS):
        loaded.client.load(LoadParams(path, ("cpu", "cpu")))
    ask(qtbot, loaded, "Hello")
    before = shown(loaded)

    def strike(total: Tensor) -> Tensor:
        wake.wait()
        return total

    quicken(monkeypatch)
    with monkeypatch.context() as context:
        Fault(context, 1, strike)
        ask(qtbot, loaded, "And now?")
    qtbot.waitUntil(lambda: "cpu (rank 1) has shown no sign of life" in banner(loaded))
    assert loaded.client.state is EngineState.EMPTY
    assert shown(loaded)[:3] == [*before, "And now?"]
    with qtbot.waitSignal(loaded.client.loaded, timeout=WAIT_MS):
        if again == "the same":
            loaded.models.load()
        else:
            loaded.client.load(LoadParams(path))
    ask(qtbot, loaded, "And now?")
    assert len(shown(loaded)[-1]) > 0
    assert shown(loaded)[:2] == before
    loaded.window.close()
    assert loaded.client.state is EngineState.CLOSED
    (hanging,) = (t for t in threading.enumerate() if t.name.startswith("tandem-rank"))
    assert hanging.name == "tandem-rank-1", "nothing waited for it"
    wake.set()
    hanging.join(10)
