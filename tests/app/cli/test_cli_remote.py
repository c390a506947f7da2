"""`generate` and `chat` with a model of a server, over real sockets."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from app.cli.talk import Interrupt
from app.core import paths
from app.remote.client.address import KeyStore, parse_url
from tests.helpers.command_line import Run, assert_refused
from tests.helpers.fake_openai import DONE, Asked, FakeOpenAI, Reply, ended, fake_openai, said


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with fake_openai() as made:
        yield made


def test_generate_prints_the_answer_of_a_server(run: Run, server: FakeOpenAI) -> None:
    outcome = run("generate", "--url", server.url, "-p", "Hi", "--temp", "0.5", "-n", "9")
    assert (outcome.status, outcome.out) == (0, "Hello from afar.\n")
    assert "[3 tokens" in outcome.err
    assert (server.answered[0]["temperature"], server.answered[0]["max_tokens"]) == (0.5, 9)


def test_no_speed_is_told_of_an_answer_that_came_at_once(run: Run, server: FakeOpenAI) -> None:
    server.plan = lambda asked: Reply([said("Hi."), ended(), DONE]) if asked.body else None
    outcome = run("generate", "--url", server.url, "-p", "Hi")
    assert "[1 tokens · prompt 0 tokens · first token after" in outcome.err


def test_the_figures_are_those_of_the_server(run: Run, server: FakeOpenAI) -> None:
    document = run("generate", "--url", server.url, "-p", "Hi", "--json").document
    assert (document["text"], document["ids"]) == ("Hello from afar.", [])
    assert document["usage"]["total_tokens"] == 10


def test_a_chat_goes_on_without_the_thoughts(run: Run, server: FakeOpenAI) -> None:
    def plan(asked: Asked) -> Reply | None:
        return (
            Reply([said("Hm.", "reasoning"), said("Yes."), ended(), DONE]) if asked.body else None
        )

    server.plan = plan
    outcome = run("chat", "--url", server.url, "--model", "small", stdin="One?\nTwo?\n")
    assert outcome.status == 0
    assert outcome.out == "<think>\nHm.\n</think>\n\nYes.\n\n" * 2
    assert [turn["content"] for turn in server.answered[1]["messages"]] == ["One?", "Yes.", "Two?"]


def test_an_error_ends_a_turn_and_not_the_chat(run: Run, server: FakeOpenAI) -> None:
    replies = [Reply(status=429), None]
    server.plan = lambda asked: replies.pop(0) if asked.body else None
    outcome = run("chat", "--url", server.url, stdin="One?\nTwo?\n")
    assert outcome.out == "Hello from afar.\n\n"
    assert "is rate-limiting" in outcome.err


def test_a_key_comes_from_a_file_or_from_the_window(
    run: Run, server: FakeOpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.core.system_keyring.keep_secret", lambda *_: False)
    KeyStore(paths.api_keys_file()).put(parse_url(server.url), "sk-window")
    run("generate", "--url", server.url, "-p", "Hi")
    assert server.asked[-1].headers["authorization"] == "Bearer sk-window"
    (tmp_path / "key").write_text("sk-file\n")
    outcome = run("generate", "--url", server.url, "-p", "Hi", "--api-key-file", tmp_path / "key")
    assert server.asked[-1].headers["authorization"] == "Bearer sk-file"
    assert "sk-" not in outcome.out + outcome.err


REFUSED = [
    ((), "No model was given"),
    (("x.gguf", "--url", "nas"), "Both a file and a server"),
    (("x.gguf", "--model", "small"), "--model needs a server"),
    (("--url", "nas", "--devices", "cpu"), "--devices has no effect"),
    (("--url", "nas", "--kv-on-host"), "--kv-on-host has no effect"),
    (("--url", "ftp://nas"), "not a valid server address"),
    (("--url", "http://127.0.0.1:9"), "cannot be reached"),
    (("--url", "nas", "--api-key-file", "/no/such"), "/no/such cannot be read"),
    (("--url", "nas", "--api-key-file", "/dev/null"), "has no key"),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED)
def test_what_cannot_be_is_one_line(run: Run, arguments: tuple[str, ...], sentence: str) -> None:
    assert_refused(run("generate", *arguments, "-p", "Hi"), sentence)


@pytest.mark.parametrize("handler_s", [0.0, 0.15], ids=["at once", "late"])
def test_ctrl_c_ends_an_answer(
    run: Run, server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch, handler_s: float
) -> None:
    """Also where the handler runs so late that the look for it should have ended before."""
    noted = Interrupt._on_signal

    def note_late(interrupt: Interrupt, number: int, frame: FrameType | None) -> None:
        time.sleep(handler_s)
        noted(interrupt, number, frame)

    def plan(asked: Asked) -> Reply | None:
        if asked.body is None:
            return None
        main = threading.main_thread().ident
        threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
        return Reply([said("Once")], is_open=True)

    monkeypatch.setattr(Interrupt, "_on_signal", note_late)
    server.plan = plan
    outcome = run("generate", "--url", server.url, "-p", "Hi")
    server.ended.set()
    assert (outcome.status, outcome.out) == (0, "Once\n"), outcome.err
    assert "cancelled" in outcome.err
