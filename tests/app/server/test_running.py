"""Where a server listens, how it starts and ends, and `tandem serve` as people run it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest

from app.server.settings import ServerSettings
from app.server.web.running import address_of, listen
from engine import EngineError
from tests.helpers.command_line import Outcome, assert_refused
from tests.helpers.served import EngineOnThread, Served

REPO = Path(__file__).resolve().parents[3]
WAIT_S = 60


def test_a_port_that_is_in_use_is_told() -> None:
    with listen(ServerSettings(port=0)) as taken:
        port = taken.getsockname()[1]
        assert address_of(taken) == f"http://127.0.0.1:{port}"
        with pytest.raises(EngineError, match=f"Port {port} of 127.0.0.1 is in use") as caught:
            listen(ServerSettings(port=port))
    assert "--port" in caught.value.hint


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("192.0.2.7", "192.0.2.7 is no address of this machine."),
        ("no such name", "There is no address no such name."),
        ("x" * 300, "There is no address"),
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


def tandem(*arguments: object, **variables: str) -> "subprocess.Popen[str]":
    """Start `tandem serve` with the demo model and an engine on a thread."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), "TANDEM_ENGINE": "thread", **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "app", "serve", "demo", "--port", "0", *map(str, arguments)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame open\n")
    process = tandem("--api-key-file", key, "--alias", "gpt-4o", "--temp", "0")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on http://127.0.0.1:"), process.communicate(timeout=WAIT_S)
    address = line.split()[-1]
    body = {"model": "gpt-4o", "prompt": "A rank", "max_tokens": 60, "ignore_eos": True}
    headers = {"authorization": "Bearer sesame open"}
    with httpx2.Client(base_url=address, trust_env=False, timeout=WAIT_S) as client:
        assert client.post("/v1/completions", json=body).status_code == 401
        streamed = {**body, "stream": True}
        with client.stream("POST", "/v1/completions", json=streamed, headers=headers) as response:
            lines = response.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGINT)
            rest = [json.loads(one[6:]) for one in lines if one.startswith("data: {")]
    assert first.startswith("data: ")
    assert rest[-1]["choices"][0]["finish_reason"] == "length", "the answer has ended by itself"
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (0, "")
    assert "Authorization: Bearer $TANDEM_API_KEY" in err
    assert "POST /v1/completions  200  60 tokens" in err
    assert "POST /v1/completions  401" in err
    assert "sesame" not in err
    assert "A rank" not in err
    assert "Traceback" not in err


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
def test_a_second_interruption_ends_at_once() -> None:
    process = tandem(TANDEM_API_KEY="sesame open")
    assert process.stdout is not None
    address = process.stdout.readline().split()[-1]
    body = {"prompt": "x", "max_tokens": -1, "ignore_eos": True, "on_overflow": "shift"}
    headers = {"x-api-key": "sesame open"}
    with (
        httpx2.Client(base_url=address, trust_env=False, timeout=WAIT_S, headers=headers) as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        said = iter(process.stderr.readline, "")
        assert any("Waiting for an answer to end" in line for line in said)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--lan",), "needs a key"),
        (("--lan", "--host", "127.0.0.1"), "Leave one out"),
        (("--port", "70000"), "70000 is no port"),
        (("--api-key", "short"), "at least 8 characters"),
        (("--api-key", ""), "The key is empty"),
        (("--api-key-file", "/nowhere"), "/nowhere cannot be read"),
        (("--keep", "0"), "--keep needs"),
        (("--temp", "9"), "temperature"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_a_sentence(
    arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from app.__main__ import main

    status = main(["serve", "demo", *arguments])
    assert_refused(Outcome(status, *capsys.readouterr()), problem)
