"""What machine 0 refuses in its handshake, before torchrun's agents may meet."""

import queue
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.hosts.machines import gathering as gathering_module
from engine.hosts.machines import joining
from engine.hosts.machines.joining import file_facts, machine_facts
from engine.hosts.machines.lines import LineError, join
from tests.helpers.tiny_gguf import tiny_gguf

TOKEN = "a token of a test"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_gguf(tmp_path / "m.gguf", quant="Q8_0")


@pytest.fixture
def gathering(path: Path) -> Iterator[engine.Gathering]:
    """Return machine 0, which waits for another one."""
    found = engine.Gathering(engine.listen_for_machines("127.0.0.1", 0), 2, TOKEN, str(path))
    yield found
    found.close()


def refusal(gathering: engine.Gathering, token: str = TOKEN, path: str = "") -> str:
    """Return the sentence with which a machine that joins is refused."""
    notes: list[str] = []
    port = gathering._sock.getsockname()[1]
    request = engine.JoinRequest("127.0.0.1", port, token, ("cpu",), path)
    with pytest.raises(LineError) as caught:
        engine.join_machines(request, notes.append)
    assert not notes, "it has not joined"
    assert not gathering.machines
    return str(caught.value)


def test_another_token_is_refused(gathering: engine.Gathering) -> None:
    assert refusal(gathering, "another token") == "The token is wrong."


@pytest.mark.parametrize("what", ["Tandem", "PyTorch", "byte order"])
def test_another_version_is_refused(
    gathering: engine.Gathering, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = machine_facts()

    def facts() -> Mapping[str, str]:
        return {**ours, what: "other"}

    monkeypatch.setattr(joining, "machine_facts", facts)
    told = f"It has {what} other, but this machine has {ours[what]}."
    assert refusal(gathering).endswith(told)


def test_a_file_of_another_size_is_refused(gathering: engine.Gathering, tmp_path: Path) -> None:
    other = tiny_gguf(tmp_path / "o.gguf", quant="Q8_0", n_ff=512)
    assert "It has a different file: " in refusal(gathering, path=str(other))


def test_another_file_of_the_same_size_is_refused(
    gathering: engine.Gathering, tmp_path: Path
) -> None:
    other = tiny_gguf(tmp_path / "o.gguf", quant="Q8_0", seed=1)
    assert "It has a different file of the same size" in refusal(gathering, path=str(other))


@pytest.mark.parametrize("devices", [7, None, ["no device"], []])
def test_devices_that_make_no_sense_leave_the_place_free(
    gathering: engine.Gathering, devices: object
) -> None:
    host, port = gathering._sock.getsockname()
    sock = socket.create_connection((host, port))
    lines = join(sock, TOKEN)
    lines.send("hello", devices=devices, **machine_facts())
    path = next(line["path"] for line in lines.alive() if line["kind"] == "file")
    lines.send("has", **file_facts(path))
    with pytest.raises(OSError, match=r"closed|reset"):
        list(lines.alive())
    lines.close()
    assert not gathering.machines


def test_only_so_many_strangers_are_listened_to(
    gathering: engine.Gathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest give way, so that they do not keep out who knows the token."""
    monkeypatch.setattr(gathering_module, "MAX_STRANGERS", 2)
    place = gathering._sock.getsockname()
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(place)) for _ in range(3)]
        greetings = [stranger.makefile("rb") for stranger in strangers]
        assert all(greeting.readline() for greeting in greetings)
        assert greetings[0].read() == b"", "the oldest is closed"
        lines = join(stack.enter_context(socket.create_connection(place)), TOKEN)
        assert greetings[1].read() == b""
        lines.close()


def test_the_name_of_a_machine_is_one_line(gathering: engine.Gathering) -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    gathering.on_change = told.put
    gathering.on_fault = lambda _, why: told.put(why)
    lines = join(socket.create_connection(gathering._sock.getsockname()), TOKEN)
    facts = {**machine_facts(), "name": "b\nall is well\x1b[2J"}
    lines.send("hello", devices=["cpu"], infos=[], **facts)
    lines.send("has", **file_facts(gathering._path))
    assert told.get(timeout=20) == "b all is well\ufffd[2J (127.0.0.1) has joined."
    lines.send("fault", why="it\nfails")
    assert told.get(timeout=20) == "b all is well\ufffd[2J (127.0.0.1): it fails."
    lines.close()


def test_a_busy_machine_is_tried_again(
    gathering: engine.Gathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "AGAIN_S", 0.01)
    tried: list[socket.socket] = []

    def connect(*where: Any) -> socket.socket:
        tried.append(connected(*where))
        if len(tried) < 3:
            tried[-1].close()
            tried[-1], other = socket.socketpair()
            other.close()  # as if it was dropped without a word
        return tried[-1]

    connected = joining.connect
    monkeypatch.setattr(joining, "connect", connect)
    assert refusal(gathering, "another token") == "The token is wrong."
    assert len(tried) == 3
    tried.clear()
    monkeypatch.setattr(joining, "BUSY_S", 0.0)
    assert "is busy with other connections" in refusal(gathering)
    assert len(tried) == 1


def test_a_machine_more_than_there_is_room_for_is_refused(gathering: engine.Gathering) -> None:
    gathering._n = 1
    assert "All 1 machines have already joined." in refusal(gathering)


def test_a_machine_that_was_lost_waits_until_its_place_is_free(
    gathering: engine.Gathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection ends, and machine 0 notices that only behind a refusal."""
    monkeypatch.setattr(joining, "AGAIN_S", 0.01)
    placed, n_asked = gathering._placed, 0
    lost: list[socket.socket] = []

    def place(*told: Any) -> tuple[Any, str]:
        nonlocal n_asked
        n_asked += 1
        return (None, "All 2 machines have already joined.") if n_asked == 2 else placed(*told)

    def connect(*where: Any) -> socket.socket:
        lost.append(connected(*where))
        return lost[-1]

    connected = joining.connect
    monkeypatch.setattr(gathering, "_placed", place)
    monkeypatch.setattr(joining, "connect", connect)
    notes: queue.SimpleQueue[str] = queue.SimpleQueue()
    request = engine.JoinRequest("127.0.0.1", gathering._sock.getsockname()[1], TOKEN, ("cpu",))
    thread = threading.Thread(target=engine.join_machines, args=(request, notes.put))
    thread.start()
    assert notes.get(timeout=20) == "Joined as machine 2 of 2."
    lost[0].shutdown(socket.SHUT_RDWR)
    assert notes.get(timeout=20).endswith("Joining again.")
    assert notes.get(timeout=20) == "Joined as machine 2 of 2."
    assert n_asked == 3
    gathering.close()
    thread.join(20)
    assert not thread.is_alive(), "the server has said that this is the end"
