"""The host against a server over real sockets: what is sent, what comes back, what goes wrong."""

import queue
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.remote.client.address import RemoteAddress, parse_url
from app.remote.client.host import RemoteHost
from app.remote.client.protocol import UNKNOWN_TOKEN
from engine import (
    IMAGE_PLACEHOLDER,
    AnswerRequest,
    Cancelled,
    ChatMessage,
    CountTokens,
    EngineError,
    Event,
    Failed,
    Finished,
    Grammar,
    HostEvent,
    ImageFile,
    Load,
    LoadParams,
    ModelLoaded,
    ModelUnloaded,
    SamplingParams,
    SaveState,
    TokensCounted,
    TokenText,
    Tool,
    ToolCall,
    ToolCallBegun,
    ToolCallEnded,
    ToolCallText,
    Unload,
)
from tests.helpers.fake_openai import (
    DONE,
    Asked,
    FakeOpenAI,
    Reply,
    ended,
    event,
    fake_openai,
    said,
)
from tests.helpers.pictures import as_file, random_picture

HELLO = AnswerRequest((ChatMessage("user", "Hi"),))
KEY = "sk-secret-key"

OWN_CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgSG6cSYIiaPWxS1O6
N6Ul+rlFOyUdS4k6Xx3erAOm776hRANCAAT4lDM6Fp/xi1wdtPy/IAohUrfmu0wr
75re6adFmPJHjTRFGxftpWrqSabrJLWDFj8dKKMSEr5UXTYoh5cFw5x+
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBfjCCASWgAwIBAgIUTCcVocbOfzisrrAlBrlrSxs734IwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMzE2NDYxM1oYDzIxMjYxMDMw
MTY0NjEzWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAT4lDM6Fp/xi1wdtPy/IAohUrfmu0wr75re6adFmPJHjTRFGxftpWrq
SabrJLWDFj8dKKMSEr5UXTYoh5cFw5x+o1MwUTAdBgNVHQ4EFgQUUXVzz5Aj0siS
I8aO77MNLRJqI2wwHwYDVR0jBBgwFoAUUXVzz5Aj0siSI8aO77MNLRJqI2wwDwYD
VR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNHADBEAiBPKRYQDPAETyFHoFHXWo57
GFQ44VgGV2ma56wcf69t7wIgfNucZyrFa/IW9xl0BkXFhTImhDbqTUAfh/gxdbZ/
h/I=
-----END CERTIFICATE-----
"""
"""A key and a certificate of its own, made for this test by `openssl req -x509`."""


class Driver:
    """A host whose events are collected by command."""

    def __init__(self, stall_s: float = 20.0) -> None:
        self._events: queue.SimpleQueue[HostEvent] = queue.SimpleQueue()
        self.host = RemoteHost(self._events.put, lambda _: KEY, stall_s=stall_s)
        self._seen: dict[int, list[Event]] = {}

    def take(self) -> HostEvent:
        found = self._events.get(timeout=20)
        self._seen.setdefault(found.command_id, []).append(found.event)
        return found

    def until_closed(self, number: int) -> list[Event]:
        """Return the events of a command up to its closing one."""
        closing = (Finished, Failed, ModelLoaded, ModelUnloaded, TokensCounted)
        while not (self._seen.get(number) and isinstance(self._seen[number][-1], closing)):
            self.take()
        return self._seen[number]

    def do(self, command: object) -> list[Event]:
        return self.until_closed(self.host.submit(command))  # type: ignore[arg-type]

    def load(self, server: FakeOpenAI, model: str = "small") -> Event:
        return self.do(Load(LoadParams(RemoteAddress(f"{server.url}/v1", model).path)))[-1]

    def problem(self, command: object = HELLO) -> EngineError:
        last = self.do(command)[-1]
        assert isinstance(last, Failed)
        assert KEY not in f"{last.error} {last.error.hint}"
        return last.error


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with fake_openai() as made:
        yield made


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    assert made.host.close()


@pytest.fixture
def loaded(driver: Driver, server: FakeOpenAI) -> Driver:
    assert isinstance(driver.load(server), ModelLoaded)
    return driver


def answers(server: FakeOpenAI, *chunks: bytes, is_open: bool = False, **more: object) -> None:
    """Have each request for an answer get these chunks."""

    def plan(asked: Asked) -> Reply | None:
        if asked.path.endswith("completions"):
            return Reply(chunks, is_open=is_open, **more)  # type: ignore[arg-type]
        return None

    server.plan = plan


def text_of(events: list[Event]) -> str:
    return "".join(one.text for one in events if isinstance(one, TokenText))


def test_a_model_of_a_server_answers(loaded: Driver, server: FakeOpenAI) -> None:
    events = loaded.do(HELLO)
    assert text_of(events) == "Hello from afar."
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.reason, last.usage.prompt_tokens, last.usage.completion_tokens) == ("stop", 7, 3)
    assert last.timings.first_token_s > 0
    assert server.asked[-1].headers["authorization"] == f"Bearer {KEY}"


def test_what_is_known_of_the_model_is_told_and_no_more(driver: Driver, server: FakeOpenAI) -> None:
    server.models = [{"id": "a/b c", "meta": {"n_ctx": 4096}, "owned_by": "tandem"}]
    loaded = driver.load(server, "a/b c")
    assert isinstance(loaded, ModelLoaded)
    assert loaded.info.name == f"a/b c – 127.0.0.1:{server.server_port}"
    assert (loaded.n_ctx, loaded.memory, loaded.info.n_bytes) == (4096, (), 0)


def test_the_only_model_needs_no_name(driver: Driver, server: FakeOpenAI) -> None:
    loaded = driver.load(server, "")
    assert isinstance(loaded, ModelLoaded)
    assert loaded.params.path.endswith("#small")


def test_a_wrong_name_is_told_with_the_right_ones(loaded: Driver, server: FakeOpenAI) -> None:
    failed = loaded.load(server, "large")
    assert isinstance(failed, Failed)
    assert "no model large" in str(failed.error)
    assert "small" in failed.error.hint
    assert text_of(loaded.do(HELLO)) == "Hello from afar."  # the model before is still there


def test_a_foreign_server_gets_the_fields_of_openai_alone(
    loaded: Driver, server: FakeOpenAI
) -> None:
    sampling = SamplingParams(max_tokens=9, seed=3, stop=("END",), presence_penalty=0.5, top_k=7)
    turns = (ChatMessage("system", "Be brief."), ChatMessage("user", "Hi"))
    loaded.do(AnswerRequest(turns, sampling=sampling, thinks=False, effort="low"))
    assert server.answered[-1] == {
        "model": "small", "stream": True, "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        ],
        "temperature": 0.8, "top_p": 0.95, "max_tokens": 9, "seed": 3, "stop": ["END"],
        "presence_penalty": 0.5,
    }  # fmt: skip


def test_pictures_are_sent_inside_of_the_request(
    loaded: Driver, server: FakeOpenAI, tmp_path: Path
) -> None:
    data = as_file(random_picture(8, 6))
    (tmp_path / "spots").write_bytes(data)
    png, jpeg = (b64encode(d).decode() for d in (data, as_file(random_picture(8, 6), "JPEG")))
    pictures = ImageFile(str(tmp_path / "spots")), jpeg
    asked = ChatMessage("user", f"First {IMAGE_PLACEHOLDER} then", pictures=pictures)
    loaded.do(AnswerRequest((asked,)))
    png, jpeg = f"data:image/png;base64,{png}", f"data:image/jpeg;base64,{jpeg}"
    assert server.answered[-1]["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": png}},
                {"type": "text", "text": "First "},
                {"type": "image_url", "image_url": {"url": jpeg}},
                {"type": "text", "text": " then"},
            ],
        }
    ]
    (tmp_path / "spots").unlink()
    assert "spots cannot be read" in str(loaded.problem(AnswerRequest((asked,))))


def test_a_tandem_gets_all_settings(driver: Driver, server: FakeOpenAI) -> None:
    server.models = [{"id": "small", "owned_by": "tandem"}]
    driver.load(server)
    sampling = SamplingParams(top_k=7, mirostat=True, logit_bias=((5, float("-inf")),))
    grammar = Grammar("gbnf", 'root ::= "x"')
    driver.do(AnswerRequest(HELLO.messages, sampling=sampling, thinks=False, grammar=grammar))
    body = server.answered[-1]
    assert (body["top_k"], body["min_p"], body["mirostat"]) == (7, 0.05, True)
    assert (body["logit_bias"], body["grammar"]) == ({"5": -100.0}, 'root ::= "x"')
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_a_thought_stands_between_marks(loaded: Driver, server: FakeOpenAI, field: str) -> None:
    answers(server, said("Let me", field), said(" think", field), said("Yes."), ended(), DONE)
    assert text_of(loaded.do(HELLO)) == "<think>\nLet me think\n</think>\n\nYes."
    parts = [
        (one.part, one.text)
        for one in loaded.do(AnswerRequest(HELLO.messages, in_parts=True))
        if isinstance(one, TokenText)
    ]
    assert parts == [("reasoning", "Let me"), ("reasoning", " think"), ("content", "Yes.")]


@pytest.mark.parametrize("reason", ["tool_calls", "length"])
def test_calls_of_functions_come_in_pieces(loaded: Driver, server: FakeOpenAI, reason: str) -> None:
    """The last one of an answer that was cut off is not whole, as some servers close it."""

    def call(**found: object) -> bytes:
        return event({"choices": [{"delta": {"tool_calls": [{"index": 0, **found}]}}]})

    answers(
        server, call(id="c1", function={"name": "look", "arguments": ""}),
        call(function={"arguments": '{"at"'}), call(function={"arguments": ": 1}"}),
        ended(reason), DONE,
    )  # fmt: skip
    tool = Tool("look", "Looks.", '{"type": "object"}')
    before = ChatMessage("assistant", "", tool_calls=(ToolCall("look", "{}", "c0"),))
    turns = (*HELLO.messages, before, ChatMessage("tool", "dark", tool_call_id="c0"))
    events = loaded.do(AnswerRequest(turns, tools=(tool,), tool_choice="=look"))
    assert events[:4] == [
        ToolCallBegun(0, "c1", "look"), ToolCallText(0, '{"at"'), ToolCallText(0, ": 1}"),
        ToolCallEnded(0, reason == "tool_calls"),
    ]  # fmt: skip
    body = server.answered[-1]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert body["parallel_tool_calls"], "or other servers end the answer behind one"
    assert body["tools"][0]["function"]["parameters"] == {"type": "object"}
    assert body["messages"][1]["tool_calls"][0]["function"]["name"] == "look"
    assert body["messages"][2]["tool_call_id"] == "c0"


def test_a_server_that_does_not_stream_is_understood(loaded: Driver, server: FakeOpenAI) -> None:
    whole = event({
        "choices": [{"message": {"content": "All at once."}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 4},
    }).removeprefix(b"data: ")  # fmt: skip
    answers(server, whole, kind="application/json")
    events = loaded.do(HELLO)
    assert text_of(events) == "All at once."
    assert isinstance(events[-1], Finished)
    assert (events[-1].reason, events[-1].usage.completion_tokens) == ("length", 4)


def test_a_raw_prompt_is_completed(loaded: Driver, server: FakeOpenAI) -> None:
    answers(server, event({"choices": [{"text": "upon a time", "finish_reason": "stop"}]}), DONE)
    assert text_of(loaded.do(AnswerRequest(prompt="Once "))) == "upon a time"
    assert server.asked[-1].path == "/v1/completions"
    assert server.answered[-1]["prompt"] == "Once "


def test_each_chunk_counts_as_a_token_where_nothing_is_told(
    loaded: Driver, server: FakeOpenAI
) -> None:
    answers(server, said("a"), said("b"), ended(), DONE)
    events = loaded.do(HELLO)
    assert [one.ids for one in events if isinstance(one, TokenText)] == [(UNKNOWN_TOKEN,)] * 2
    assert isinstance(events[-1], Finished)
    assert events[-1].usage.completion_tokens == 2


def test_several_answers_come_at_once_and_one_is_stopped(
    loaded: Driver, server: FakeOpenAI
) -> None:
    answers(server, said("Once"), is_open=True)
    numbers = [loaded.host.submit(HELLO) for _ in range(3)]
    texts = {loaded.take().command_id for _ in numbers}
    assert texts == set(numbers)
    loaded.host.cancel(numbers[1])
    last = loaded.until_closed(numbers[1])[-1]
    assert isinstance(last, Finished)
    assert (last.reason, last.usage.completion_tokens) == ("cancelled", 1)
    loaded.host.cancel()
    for number in (numbers[0], numbers[2]):
        assert isinstance(loaded.until_closed(number)[-1], Finished)


def test_a_silent_server_is_stopped_at_once(loaded: Driver, server: FakeOpenAI) -> None:
    is_there = threading.Event()

    def silent(_: Asked) -> Reply:
        is_there.set()
        server.ended.wait(20)
        return Reply()

    server.plan = silent
    number = loaded.host.submit(HELLO)
    assert is_there.wait(10)
    start = time.monotonic()
    loaded.host.cancel(number)
    assert isinstance(loaded.until_closed(number)[-1], Finished)
    assert loaded.host.close(10)  # its thread has ended, though the server has not answered
    assert time.monotonic() - start < 5
    server.ended.set()


def test_a_load_waits_for_answers_and_what_follows_for_the_load(
    loaded: Driver, server: FakeOpenAI
) -> None:
    server.models.append({"id": "other"})
    answers(server, said("Once"), is_open=True)
    first = loaded.host.submit(HELLO)
    loaded.take()
    load = loaded.host.submit(Load(LoadParams(RemoteAddress(f"{server.url}/v1", "other").path)))
    second = loaded.host.submit(HELLO)
    loaded.host.cancel(first)
    assert isinstance(loaded.until_closed(load)[-1], ModelLoaded)
    loaded.take()
    assert server.answered[-1]["model"] == "other"
    loaded.host.cancel(second)
    loaded.until_closed(second)


def test_a_load_can_be_cancelled(driver: Driver, server: FakeOpenAI) -> None:
    server.plan = lambda _: Reply([b"{"], is_open=True, kind="application/json")
    number = driver.host.submit(Load(LoadParams(f"{server.url}/v1")))
    while not server.asked:
        time.sleep(0.01)
    driver.host.cancel(number)
    last = driver.until_closed(number)[-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, Cancelled)


def test_after_an_unload_there_is_no_model(loaded: Driver) -> None:
    assert loaded.do(Unload()) == [ModelUnloaded()]
    assert "No server is connected" in str(loaded.problem())


def test_what_only_a_model_on_this_machine_can_do_is_refused(loaded: Driver) -> None:
    assert "do not support this" in str(loaded.problem(SaveState("x")))
    regex = AnswerRequest(HELLO.messages, grammar=Grammar("regex", "x"))
    assert "this kind of grammar" in str(loaded.problem(regex))


def test_a_tandem_counts_tokens_and_others_say_that_they_do_not(
    driver: Driver, server: FakeOpenAI
) -> None:
    driver.load(server)
    assert "cannot count" in str(driver.problem(CountTokens(None, "x")))
    server.models = [{"id": "small", "owned_by": "tandem"}]
    driver.load(server)
    counts = driver.do(CountTokens((ChatMessage("user", "a b c"),), "two words"))
    assert counts == [TokensCounted(4, 2)]
    driver.do(CountTokens((ChatMessage("user", "a"),), tools=(Tool("look", "Looks."),)))
    (asked,) = [r.body for r in server.asked if r.path == "/apply-template"][1:]
    assert asked["tools"][0]["function"] == {"name": "look", "description": "Looks."}


# what goes wrong

STATUS = {
    401: "rejected the API key", 403: "rejected the API key", 404: "no such model or endpoint",
    429: "is rate-limiting", 500: "returned error 500", 503: "returned error",
    400: "rejected the request", 204: "rejected the request",
}  # fmt: skip


@pytest.mark.parametrize(("status", "sentence"), STATUS.items())
def test_each_status_is_a_sentence(
    loaded: Driver, server: FakeOpenAI, status: int, sentence: str
) -> None:
    said_by = b'{"error": {"message": "It was\\u001b[2J sk-secret-key, this time."}}' * (
        status != 204
    )
    answers(server, said_by, status=status, kind="application/json")
    error = loaded.problem()
    assert error.message.startswith("127.0.0.1:")
    with pytest.raises(EngineError, match=sentence):
        raise error
    if status != 204:
        assert "It was" in error.message
        assert "…, this time." in error.message
        assert error.message.isprintable()


def test_a_redirect_is_told_and_not_followed(loaded: Driver, server: FakeOpenAI) -> None:
    with fake_openai() as other:
        answers(server, status=307, headers={"Location": f"{other.url}/v1?token=x"})
        error = loaded.problem()
        assert f"redirects to {other.url}/v1." in error.message
        assert not other.asked


WRONG: dict[str, tuple[str, Callable[[FakeOpenAI], None]]] = {
    "no JSON": ("unexpected response", lambda s: answers(s, b"data: {oops\n\n")),
    "deep JSON": ("unexpected response", lambda s: answers(s, b"data: " + b"[" * 99_999 + b"\n\n")),
    "a number": ("unexpected response", lambda s: answers(s, b"data: 5\n\n")),
    "Latin-1": ("not UTF-8", lambda s: answers(s, "data: ü\n\n".encode("latin-1"))),
    "a huge line": ("too long", lambda s: answers(s, b"data: " + b"x" * (3 << 20))),
    "a page": ("unexpected response", lambda s: answers(s, b"<html>", kind="text/html")),
    "packed": (
        "unexpected response",
        lambda s: answers(s, b"\x1f\x8b", headers={"Content-Encoding": "gzip"}),
    ),
    "an error": (
        "ended the answer with an error. Out of memory",
        lambda s: answers(s, said("Well"), event({"error": {"message": "Out of memory"}})),
    ),
    "a cut": ("ended the answer early", lambda s: answers(s, said("Once upon"))),
    "a large answer": (
        "too long", lambda s: answers(s, *[b" " * (1 << 20)] * 10, kind="application/json")
    ),
    "no text at all": ("ended the answer early", lambda s: answers(s)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_whatever_a_server_sends_is_a_sentence(
    loaded: Driver, server: FakeOpenAI, name: str
) -> None:
    sentence, spoil = WRONG[name]
    spoil(server)
    with pytest.raises(EngineError, match=sentence):
        raise loaded.problem()
    server.plan = lambda _: None
    assert text_of(loaded.do(HELLO)) == "Hello from afar."


def test_odd_chunks_are_left_out(loaded: Driver, server: FakeOpenAI) -> None:
    odd = [
        {}, {"choices": None}, {"choices": [5]}, {"choices": [{"delta": {"content": 5}}]},
        {"usage": 5}, {"usage": {"prompt_tokens": -1, "completion_tokens": 1e300}},
        {"choices": [{"delta": {"tool_calls": [5, {"function": None}]}}]},
    ]  # fmt: skip
    half = b'data: {"choices": [{"delta": {"content": "\\ud83d"}}]}\n\n'
    answers(server, *map(event, odd), half, ended(), DONE)
    events = loaded.do(HELLO)
    assert text_of(events) == "?"
    assert isinstance(events[-1], Finished)


def test_an_answer_without_an_end_is_stopped(
    loaded: Driver, server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.remote.client.protocol.MAX_TEXT", 10_000)

    def endless() -> Iterator[bytes]:
        while not server.ended.is_set():
            yield said("word " * 100)

    server.plan = lambda asked: Reply(endless()) if asked.body else None
    assert "is too long" in str(loaded.problem())


def test_pings_keep_a_silent_answer_alive_and_silence_ends_it(server: FakeOpenAI) -> None:
    def pings() -> Iterator[bytes]:
        for _ in range(6):
            time.sleep(0.1)
            yield b": ping\n\n"
        yield said("At last.")

    driver = Driver(stall_s=0.4)
    driver.load(server)
    server.plan = lambda asked: Reply(pings(), is_open=True) if asked.body else None
    number = driver.host.submit(HELLO)
    events = driver.until_closed(number)
    assert text_of(events) == "At last."
    assert isinstance(events[-1], Failed)
    assert "has sent nothing for" in str(events[-1].error)
    assert not events[-1].is_model_lost  # the server answers other requests
    assert driver.host.close()


def test_a_server_that_says_no_more_behind_the_end_is_not_waited_for(
    loaded: Driver, server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.remote.client.host.LAST_S", 0.1)
    answers(server, said("Yes."), ended("length"), is_open=True)
    last = loaded.do(HELLO)[-1]
    assert isinstance(last, Finished)
    assert last.reason == "length"


def test_a_server_that_vanishes_takes_the_model_along_and_comes_back(driver: Driver) -> None:
    with fake_openai() as server:
        loaded = driver.load(server)
        assert isinstance(loaded, ModelLoaded)
        port = server.server_port
    last = driver.do(HELLO)[-1]
    assert isinstance(last, Failed)
    assert "cannot be reached" in str(last.error)
    assert last.is_model_lost
    assert "cannot be reached" in str(driver.problem(Load(loaded.params)))
    with fake_openai(port):
        assert isinstance(driver.do(Load(loaded.params))[-1], ModelLoaded)
        assert text_of(driver.do(HELLO)) == "Hello from afar."


def test_a_server_that_dies_in_an_answer_is_gone(driver: Driver) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    replies = [
        b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"data": [{"id": "m"}]}',
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\n"
        + said("Once"),
    ]

    def serve() -> None:
        for reply in replies:
            connection, _ = listening.accept()
            connection.recv(65536)
            if reply is replies[-1]:
                listening.close()
            connection.sendall(reply)
            connection.close()

    thread = threading.Thread(target=serve)
    port = listening.getsockname()[1]
    thread.start()
    loaded = driver.do(Load(LoadParams(f"http://127.0.0.1:{port}/v1")))[-1]
    assert isinstance(loaded, ModelLoaded)
    events = driver.do(HELLO)
    thread.join()
    assert text_of(events) == "Once"
    assert isinstance(events[-1], Failed)
    assert "was lost" in str(events[-1].error)
    assert events[-1].is_model_lost


def test_a_certificate_that_nobody_vouches_for_is_told(
    driver: Driver, server: FakeOpenAI, tmp_path: Path
) -> None:
    (tmp_path / "own.pem").write_text(OWN_CERTIFICATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    address = parse_url(server.url.replace("http", "https"))
    assert "is not trusted" in str(driver.problem(Load(LoadParams(address.path))))
    assert not server.asked


def test_https_to_a_server_without_it_is_told(driver: Driver, server: FakeOpenAI) -> None:
    address = parse_url(server.url.replace("http", "https"))
    assert "does not use TLS" in str(driver.problem(Load(LoadParams(address.path))))


@pytest.mark.parametrize(
    "data", [b"[]", b"{}", b'{"data": 5}', b"no", b"", b'{"data": [5, {"id": 5}, {"id": ""}]}']
)
def test_a_wrong_list_of_models_is_a_sentence(
    driver: Driver, server: FakeOpenAI, data: bytes
) -> None:
    server.plan = lambda _: Reply([data], kind="application/json")
    error = driver.problem(Load(LoadParams(f"{server.url}/v1#small")))
    assert error.message.startswith(("127.0.0.1:", "The answer from 127.0.0.1:"))


def test_a_server_may_tell_how_many_guesses_were_right(loaded: Driver, server: FakeOpenAI) -> None:
    details = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}
    usage = {"prompt_tokens": 1, "completion_tokens": 9, "completion_tokens_details": details}
    answers(server, said("Hi"), ended(), event({"choices": [], "usage": usage}), DONE)
    last = loaded.do(HELLO)[-1]
    assert isinstance(last, Finished)
    assert (last.usage.n_drafted, last.usage.n_accepted) == (7, 5)
