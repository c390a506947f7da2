"""A second start hands its file to the window that is open."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from PySide6.QtCore import QObject
from PySide6.QtNetwork import QLocalSocket
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.core.paths import settings_file
from app.core.process import single_window
from app.core.process.single_window import OpenRequest, SecondStarts, hand_over, quit_window
from tests.helpers.shell_driver import MODEL, MakeShell

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="plays with Unix sockets")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a home of its own; sockets are in a folder whose name is short, as they need."""
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    with tempfile.TemporaryDirectory() as sockets:
        monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
        yield tmp_path


@pytest.fixture
def first(home: Path, qapp: QApplication) -> Iterator[SecondStarts]:
    """Yield the receiver of the first window."""
    starts = SecondStarts(QObject(qapp))
    assert starts.claim()
    starts.listen()
    yield starts
    starts.close()


@pytest.fixture
def handed(qtbot: QtBot) -> Callable[..., bool]:
    """Return what hands over as another process, and returns whether it was taken."""

    def hand(model: str | None = None, *, demo: bool = False) -> bool:
        code = f"import sys; sys.exit(not hand_over({model!r}, demo={demo}))"
        code = f"from app.core.process.single_window import hand_over; {code}"
        process = subprocess.Popen([sys.executable, "-c", code])
        qtbot.waitUntil(lambda: process.poll() is not None, timeout=30_000)
        return process.returncode == 0

    return hand


def test_the_file_of_a_second_start_arrives(
    first: SecondStarts,
    handed: Callable[..., bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[OpenRequest] = []
    first.requested.connect(asked.append)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_ACTIVATION_TOKEN", "for this click")
    assert handed("ü model.gguf")
    assert handed(demo=True)
    token = "for this click"
    assert asked == [
        OpenRequest(str(tmp_path / "ü model.gguf"), False, token), OpenRequest("", True, token),
    ]  # fmt: skip


@pytest.mark.usefixtures("home")
def test_starts_in_a_flatpak_meet_in_the_folder_that_they_share(
    home: Path, monkeypatch: pytest.MonkeyPatch, qapp: QApplication, handed: Callable[..., bool]
) -> None:
    shared = Path(os.environ["XDG_RUNTIME_DIR"]) / "app" / "org.tandem_llm.Tandem"
    shared.mkdir(parents=True)
    monkeypatch.setenv("FLATPAK_ID", shared.name)
    starts = SecondStarts(QObject(qapp))
    assert starts.claim()
    starts.listen()
    assert [path.name[:7] for path in shared.iterdir()] == ["tandem-"]
    assert handed()
    starts.close()


def test_without_a_window_nothing_is_handed_over(handed: Callable[..., bool]) -> None:
    assert not handed("model.gguf")
    assert quit_window()


def test_only_one_window_listens_and_another_may_follow(
    first: SecondStarts, handed: Callable[..., bool]
) -> None:
    second = SecondStarts(first)
    assert not second.claim()
    second.listen()
    first.close()
    assert not handed()
    assert second.claim()
    second.listen()
    assert handed()
    second.close()


@pytest.mark.usefixtures("home")
def test_a_killed_window_is_followed_by_another(
    qapp: QApplication, handed: Callable[..., bool]
) -> None:
    code = (
        "import os\nfrom PySide6.QtCore import QCoreApplication\n"
        "from app.core.process.single_window import SecondStarts\n"
        "app = QCoreApplication([])\nstarts = SecondStarts(app)\n"
        "assert starts.claim()\nstarts.listen()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert settings_file().with_name("window.lock").exists()
    assert not handed()
    starts = SecondStarts(qapp)
    assert starts.claim()
    starts.listen()
    assert handed()
    starts.close()


def test_a_window_that_does_not_answer_is_not_waited_for(
    first: SecondStarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_window, "ANSWER_S", 0.3)
    monkeypatch.setattr(single_window, "QUIT_S", 0.1)
    assert not hand_over("model.gguf", demo=False)  # on its thread, which therefore cannot answer
    assert not quit_window()


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\n", b"[]\n", b"{}\n", b'{"model": 3, "activation": ""}\n',
        b"[" * 50_000 + b"\n", b"x" * 200_000 + b"\n",
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused_and_the_next_one_is_taken(
    first: SecondStarts, handed: Callable[..., bool], qtbot: QtBot, line: bytes
) -> None:
    asked: list[OpenRequest] = []
    first.requested.connect(asked.append)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(single_window._address())
        other.settimeout(0.01)

        def is_hung_up() -> bool:
            try:
                return other.recv(9) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        thread = threading.Thread(target=_send, args=(other.dup(), line))
        thread.start()
        qtbot.waitUntil(is_hung_up)
        thread.join()
    assert asked == []
    assert handed()


def _send(other: socket.socket, line: bytes) -> None:
    with other, suppress(OSError):  # hung up in the middle
        other.sendall(line)


@pytest.mark.usefixtures("first")
def test_a_socket_that_is_somebody_elses_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(single_window, "ANSWER_S", 0.1)
    monkeypatch.setattr(QLocalSocket, "connectToServer", lambda _, name: tried.append(name))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert not hand_over(None, demo=False)
    assert not tried


def test_the_window_opens_what_it_is_asked_for(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    shell.window.showMinimized()
    shell.take(OpenRequest(MODEL))
    qtbot.waitUntil(lambda: shell.client.model is not None)
    assert not shell.window.isMinimized()


def test_a_second_program_ends_at_once_and_another_closes_the_window(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "none.gguf").write_bytes(b"no model")
    command = [sys.executable, "-m", "app"]
    with subprocess.Popen([*command, "--new-window"]) as window:
        try:
            lock = settings_file().with_name("window.lock")
            _wait(lambda: lock.exists() or window.poll() is not None)
            second = subprocess.run(
                [*command, str(tmp_path / "none.gguf")], capture_output=True, text=True, timeout=60,
                check=True,
            )  # fmt: skip
            assert second.stdout == "Tandem is already open; its window was notified.\n"
            assert window.poll() is None
            subprocess.run([*command, "--quit"], timeout=60, check=True)
            assert window.wait(30) == 0
        finally:
            window.terminate()


def _wait(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.02)
