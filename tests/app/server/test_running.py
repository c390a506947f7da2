"""Where a server listens, how it starts and ends, and `tandem serve` as people run it."""

import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from app.__main__ import main
from app.cli.output import note
from app.cli.server import serve as serving
from app.server.settings import ServerSettings
from app.server.web.server import address_of, listen
from engine import EngineError
from tests.helpers.command_line import Outcome, assert_refused
from tests.helpers.served import EngineOnThread, Served

WAIT_S = 60


def test_a_port_that_is_in_use_is_told() -> None:
    with listen(ServerSettings(port=0)) as taken:
        port = taken.getsockname()[1]
        assert address_of(taken) == f"http://127.0.0.1:{port}"
        with pytest.raises(
            EngineError, match=f"Port {port} of 127.0.0.1 is already in use"
        ) as caught:
            listen(ServerSettings(port=port))
    assert "--port" in caught.value.hint


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("192.0.2.7", "192.0.2.7 is not an address of this machine."),
        ("no such name", "no such name is not a valid address."),
        ("x" * 300, "xxx"),
    ],
)  # fmt: skip
def test_an_address_that_is_not_here_is_told(host: str, sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        listen(ServerSettings(host=host, port=0, key="long enough"))


@pytest.mark.skipif(not socket.has_ipv6, reason="this system has no IPv6")
def test_an_address_of_ipv6_has_brackets() -> None:
    with listen(ServerSettings(host="::1", port=0)) as sock:
        assert address_of(sock) == f"http://[::1]:{sock.getsockname()[1]}"


def test_a_server_on_a_thread_ends_in_time_with_its_answers(demo_engine: EngineOnThread) -> None:
    body = {
        "messages": [{"role": "user", "content": "Go on"}], "stream": True, "ignore_eos": True,
        "on_overflow": "shift",
    }  # fmt: skip
    before = set(threading.enumerate())
    n_cancelled = len(demo_engine.cancelled)
    with Served(demo_engine) as server:
        client = httpx2.Client(base_url=server.address, trust_env=False)
        with client, client.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_lines())
            start = time.perf_counter()
            server.stop()
            assert time.perf_counter() - start < 2.0
    assert len(demo_engine.cancelled) == n_cancelled + 1
    assert set(threading.enumerate()) <= before
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{server.address}/health", trust_env=False)


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost:"])
def test_a_connection_without_a_request_is_closed(
    demo_engine: EngineOnThread, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """So that nobody can hold all connections there are."""
    monkeypatch.setattr("app.server.web.server.HEAD_S", 0.2)
    with Served(demo_engine) as server:
        split = urlsplit(server.address)
        with socket.create_connection((split.hostname, split.port), WAIT_S) as connection:
            connection.sendall(sent)
            assert connection.recv(1000) == b""
        with httpx2.Client(base_url=server.address, trust_env=False) as client:
            for _ in range(2):
                assert client.get("/health").status_code == 200
                time.sleep(0.3)  # a connection that was of use stays


class Command:
    """`tandem serve` with the demo model in this process, asked from a thread.

    Args:
        ask: asks the server at an address, and ends it by signals.
    """

    def __init__(self, ask: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
        self._ask, self._written = ask, queue.SimpleQueue[str]()
        self.problems: list[BaseException] = []
        self.is_ending = threading.Event()
        monkeypatch.setenv("TANDEM_ENGINE", "thread")
        monkeypatch.setattr(serving, "write", self._written.put)
        monkeypatch.setattr(serving, "note", self._note)

    def run(self, *arguments: object) -> int:
        """Run the command and return its status."""
        thread = threading.Thread(target=self._talk)
        thread.start()
        status = main(["serve", "demo", "--port", "0", *map(str, arguments)])
        thread.join(WAIT_S)
        assert not self.problems
        assert self._written.empty(), "stdout has one line"
        return status

    def _note(self, text: str) -> None:
        note(text)
        if "Waiting for an answer to finish" in text:
            self.is_ending.set()

    def _talk(self) -> None:
        try:
            line = self._written.get(timeout=WAIT_S)
            assert line.startswith("listening on http://127.0.0.1:")
            self._ask(line.split()[-1])
        except BaseException as error:
            self.problems.append(error)
            signal.raise_signal(signal.SIGINT)
            raise


def interrupt(number: signal.Signals) -> None:
    """Send a signal to this process."""
    os.kill(os.getpid(), number)


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
def test_the_command_serves_until_it_is_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_text("sesame open\n")
    body = {"model": "gpt-4o", "prompt": "A rank", "max_tokens": 60, "ignore_eos": True}
    chunks: list[Any] = []

    def ask(address: str) -> None:
        headers = {"authorization": "Bearer sesame open"}
        with httpx2.Client(base_url=address, trust_env=False, timeout=WAIT_S) as client:
            assert client.post("/v1/completions", json=body).status_code == 401
            assert client.get("/%0aforged%20line").status_code == 401
            client.headers.update(headers)
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: ")
                interrupt(signal.SIGINT)
                chunks.extend(json.loads(one[6:]) for one in lines if one.startswith("data: {"))

    arguments = ("--api-key-file", key, "--alias", "gpt-4o", "--temp", "0")
    assert Command(ask, monkeypatch).run(*arguments) == 0
    reason = chunks[-1]["choices"][0]["finish_reason"]
    assert reason == "length", "the answer has ended by itself"
    err = capsys.readouterr().err
    assert "Authorization: Bearer $TANDEM_API_KEY" in err
    assert "POST /v1/completions  200  60 tokens" in err
    assert "POST /v1/completions  401" in err
    assert "sesame" not in err
    assert "\nforged line" not in err
    assert "A rank" not in err
    assert "Traceback" not in err


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
def test_a_second_interruption_ends_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "x", "max_tokens": -1, "ignore_eos": True, "on_overflow": "shift"}
    monkeypatch.setenv("TANDEM_API_KEY", "sesame open")

    def ask(address: str) -> None:
        client = httpx2.Client(base_url=address, trust_env=False, timeout=WAIT_S)
        client.headers["x-api-key"] = "sesame open"
        streamed = {**body, "stream": True}
        with client, client.stream("POST", "/v1/completions", json=streamed) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            interrupt(signal.SIGTERM)
            assert command.is_ending.wait(WAIT_S)
            assert any(line.startswith("data: {") for line in lines), "it goes on"
            interrupt(signal.SIGTERM)
            with suppress(httpx2.RemoteProtocolError):
                assert len(list(lines)) < 1000

    command = Command(ask, monkeypatch)
    assert command.run() == 128 + signal.SIGTERM
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--lan",), "needs a key"),
        (("--lan", "--host", "127.0.0.1"), "Omit one"),
        (("--port", "70000"), "70000 is not a valid port"),
        (("--api-key", "short"), "at least 8 printable"),
        (("--api-key", ""), "The key is empty"),
        (("--api-key-file", "/nowhere"), "/nowhere cannot be read"),
        (("--keep", "0"), "--keep needs"),
        (("--temp", "9"), "temperature"),
        (("--models", "/nowhere", "--port", "0"), "There is no folder /nowhere"),
        (("--only", "--models", "/"), "cannot be combined"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_a_sentence(
    arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["serve", "demo", *arguments])
    assert_refused(Outcome(status, *capsys.readouterr()), problem)
