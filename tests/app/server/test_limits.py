"""Limits of size, time and number, and clients that go away."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx2
import pytest
from openai import OpenAI, RateLimitError

from app.server.refusal import Refusal, check_conversation
from app.server.request_body import SMALL_BODY, ValueCounter
from app.server.request_fields import read_request
from engine import ApplyTemplate, ChatMessage
from tests.helpers.served import EngineOnThread, Served

ENDLESS = {
    "messages": [{"role": "user", "content": "Go on"}], "stream": True, "ignore_eos": True,
    "on_overflow": "shift",
}  # fmt: skip
"""A request whose answer does not end by itself."""

WAIT_S = 30.0


def wait_until(is_so: Callable[[], bool]) -> float:
    """Wait until something is so, and return the seconds that it took."""
    start = time.perf_counter()
    while not is_so():
        assert time.perf_counter() < start + WAIT_S
        time.sleep(0.005)
    return time.perf_counter() - start


@contextmanager
def asking(served: Served, body: dict[str, object]) -> Iterator[socket.socket]:
    """A connection that has sent a request, and closes without a word."""
    split = urlsplit(served.address)
    sent = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {split.netloc}\r\n"
        f"content-length: {len(sent)}\r\n\r\n"
    )
    with socket.create_connection((split.hostname, split.port), WAIT_S) as connection:
        connection.sendall(head.encode() + sent)
        yield connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_the_engine_within_a_second(
    demo_engine: EngineOnThread, served: Served, *, stream: bool
) -> None:
    n_before = len(demo_engine.cancelled)
    with asking(served, {**ENDLESS, "stream": stream}):
        wait_until(lambda: any(one.n_tokens or one.n_read for one in running(served)))
    seconds = wait_until(lambda: not running(served))
    assert seconds < 1.0
    assert len(demo_engine.cancelled) == n_before + 1
    assert served.context.request_log.ended[-1].status in (200, 499)
    assert served.context.admission.n_running == 0


def running(served: Served) -> list[object]:
    return list(served.context.request_log.running.values())


def test_several_answers_end_with_their_client(demo_engine: EngineOnThread, served: Served) -> None:
    n_before = len(demo_engine.cancelled)
    with asking(served, {**ENDLESS, "n": 3}):
        wait_until(lambda: any(one.n_tokens > 30 for one in running(served)))
    wait_until(lambda: len(demo_engine.cancelled) == n_before + 3)


def test_more_than_can_wait_is_told_when_to_come_again(demo_engine: EngineOnThread) -> None:
    with (
        Served(demo_engine, most_running=1, most_waiting=1) as server,
        server.client() as client,
        asking(server, ENDLESS),
    ):
        wait_until(lambda: server.context.admission.n_running == 1)
        with asking(server, ENDLESS):
            wait_until(lambda: server.context.admission.n_waiting == 1)
            with pytest.raises(RateLimitError, match="already waiting") as caught:
                client.completions.create(model="", prompt="x")
            assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        wait_until(lambda: server.context.admission.n_waiting == 0)


def test_who_waits_is_answered_in_order(demo_engine: EngineOnThread) -> None:
    with Served(demo_engine, most_running=1) as server, server.client() as client:
        texts: list[str] = []

        def ask() -> None:
            done = client.completions.create(model="", prompt="A rank", temperature=0, max_tokens=4)
            texts.append(done.choices[0].text)

        with asking(server, ENDLESS):
            wait_until(lambda: server.context.admission.n_running == 1)
            threads = [threading.Thread(target=ask) for _ in range(3)]
            for thread in threads:
                thread.start()
            wait_until(lambda: server.context.admission.n_waiting == 3)
            assert texts == []
        for thread in threads:
            thread.join(WAIT_S)
        assert len(texts) == 3
        assert len(set(texts)) == 1


def test_an_answer_that_takes_too_long_ends_where_it_is(demo_engine: EngineOnThread) -> None:
    with Served(demo_engine, most_answer_s=0.3) as server, server.client() as client:
        done = client.chat.completions.create(
            model="", messages=[{"role": "user", "content": "Go on"}],
            extra_body={"ignore_eos": True, "on_overflow": "shift"},
        )  # fmt: skip
    assert done.choices[0].finish_reason == "length"
    assert done.choices[0].message.content
    assert done.usage is not None
    assert done.usage.completion_tokens > 0


def test_a_request_that_is_too_large_is_refused(demo_engine: EngineOnThread) -> None:
    with (
        Served(demo_engine, most_body=1000) as server,
        httpx2.Client(base_url=server.address, trust_env=False) as client,
    ):
        announced = client.post("/v1/completions", content=b" " * 1001)
        assert announced.status_code == 413
        in_pieces = client.post("/v1/completions", content=iter([b" " * 600] * 2))
        assert in_pieces.status_code == 413
        assert "larger than 1000 bytes" in in_pieces.json()["error"]["message"]


def test_pictures_have_room_of_their_own(demo_engine: EngineOnThread) -> None:
    def chat(text: str, picture: str) -> dict[str, object]:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
        return {"messages": [{"role": "user", "content": [{"type": "text", "text": text}, image]}]}

    with (
        Served(demo_engine, most_body=1000, most_pictures=3000) as server,
        httpx2.Client(base_url=server.address, trust_env=False) as client,
    ):
        shown = client.post("/v1/chat/completions", json=chat("x", "A" * 2500))
        assert shown.status_code == 400
        assert "images" in shown.json()["error"]["message"], "the demo model sees none"
        for text, picture in (("x" * 2500, "AAAA"), ("x", "A" * 4000)):
            large = client.post("/v1/chat/completions", json=chat(text, picture))
            assert large.status_code == 413


@pytest.mark.parametrize("item", [b"[]", b'{"a":{}}', b'"x"', b"7,7,7,7,7,7,7,7"])
def test_more_values_than_can_be_read_quickly_are_refused(
    http: httpx2.Client, monkeypatch: pytest.MonkeyPatch, item: bytes
) -> None:
    monkeypatch.setattr("app.server.request_body.MAX_VALUES", 1000)

    def ask(n: int) -> httpx2.Response:
        items = b",".join([item] * n)
        body = b'{"prompt": "x", "max_tokens": 1, "unknown": [%s]}' % items
        return http.post("/v1/completions", content=body)

    assert ask(100).status_code == 200
    refused = ask(1000)
    assert refused.status_code == 413
    assert "more than 1000 values" in refused.json()["error"]["message"]


def test_commas_of_texts_are_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the body is cut into pieces."""
    body = json.dumps({"a": 'x\\",[{",' * 20, "b\\": ["y,,,,,,", {}, []]}).encode()
    monkeypatch.setattr("app.server.request_body.MAX_VALUES", 8.375)
    for size in range(1, len(body) + 1):
        counter = ValueCounter()
        for at in range(0, len(body), size):
            counter.add(body[at : at + size])
        with pytest.raises(Refusal, match="values"):
            counter.add(b",")


def test_others_are_answered_while_a_large_body_is_parsed(
    demo_engine: EngineOnThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_parsing, may_go_on = threading.Event(), threading.Event()

    def parse(kind: type, body: bytes, most: int) -> object:
        is_parsing.set()
        assert may_go_on.wait(WAIT_S)
        return read_request(kind, body, most)

    monkeypatch.setattr("app.server.web.routes.read_request", parse)
    large = {"messages": [], "unknown": "x" * SMALL_BODY}
    with Served(demo_engine) as server, asking(server, large) as connection:
        assert is_parsing.wait(WAIT_S)
        health = httpx2.get(f"{server.address}/health", trust_env=False, timeout=5)
        may_go_on.set()
        assert health.status_code == 200
        assert b" 400 " in connection.recv(1000).partition(b"\r\n")[0]


def test_bodies_have_a_common_limit(demo_engine: EngineOnThread) -> None:
    large = {"prompt": "x", "max_tokens": 1, "unknown": "y" * 2 * SMALL_BODY}
    with (
        Served(demo_engine, most_bodies=3 * SMALL_BODY) as server,
        httpx2.Client(base_url=server.address, trust_env=False, timeout=60) as client,
    ):
        split = urlsplit(server.address)
        head = f"POST /tokenize HTTP/1.1\r\nhost: {split.netloc}\r\ncontent-length: 999999\r\n"
        with socket.create_connection((split.hostname, split.port), WAIT_S) as connection:
            connection.sendall(head.encode() + b"\r\n" + b" " * 2 * SMALL_BODY)
            wait_until(lambda: server.context.request_log.n_held == 2 * SMALL_BODY)
            refused = client.post("/v1/completions", json=large)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            assert "requests together exceed 0.75 MiB" in refused.json()["error"]["message"]
            small = {"prompt": "x", "max_tokens": 1}
            assert client.post("/v1/completions", json=small).status_code == 200
        wait_until(lambda: server.context.request_log.n_held == 0)
        assert client.post("/v1/completions", json=large).status_code == 200


LONG_TURN = {"role": "user", "content": "x" * 2_200_000}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"content": "word " * 500_000}, "content"),
        ("/detokenize", {"tokens": [5] * 300_000}, "tokens"),
        ("/apply-template", {"messages": [LONG_TURN]}, "messages"),
        (
            "/v1/messages/count_tokens",
            {"model": "", "messages": [LONG_TURN, LONG_TURN], "max_tokens": 1},
            "messages",
        ),
    ],
    ids=["tokenize", "detokenize", "template", "count"],
)  # fmt: skip
def test_more_text_than_is_worth_reading_is_refused(
    http: httpx2.Client, path: str, body: dict[str, object], param: str
) -> None:
    response = http.post(path, json=body)
    assert response.status_code in (400, 413)
    assert "at most" in response.text
    assert param in response.text


def test_pictures_are_no_text_of_a_conversation() -> None:
    seen = ChatMessage("user", "What is this?", pictures=("x" * 3_000_000,))
    check_conversation(ApplyTemplate((seen,)))
    with pytest.raises(Refusal, match="at most 2097152"):
        check_conversation(ApplyTemplate((ChatMessage("user", "x" * 3_000_000),)))


def test_a_request_that_comes_too_slowly_is_refused(demo_engine: EngineOnThread) -> None:
    with Served(demo_engine, most_read_s=0.1) as server:
        split = urlsplit(server.address)
        with socket.create_connection((split.hostname, split.port), WAIT_S) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {split.netloc}\r\ncontent-length: 9\r\n"
            connection.sendall(head.encode() + b"\r\n{")
            assert b" 408 " in connection.recv(1000).partition(b"\r\n")[0]


def test_a_stream_shows_signs_of_life_while_it_waits(demo_engine: EngineOnThread) -> None:
    with Served(demo_engine, most_running=1, ping_s=0.05) as server, asking(server, ENDLESS):
        wait_until(lambda: server.context.admission.n_running == 1)
        with asking(server, ENDLESS) as connection:
            read = b""
            while read.count(b": ping\n\n") < 3:
                read += connection.recv(1000)
    assert b" 200 OK" in read
    assert b"text/event-stream" in read
    assert b"data:" not in read


def test_a_client_behind_a_slow_line_gets_all(client: OpenAI, http: httpx2.Client) -> None:
    body = {**ENDLESS, "max_tokens": 300, "seed": 1, "on_overflow": "stop"}
    texts = []
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            time.sleep(0.001)
            if line.startswith("data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                texts.append(delta.get("content") or "")
    whole = client.chat.completions.create(
        model="", messages=ENDLESS["messages"], max_tokens=300, seed=1,  # type: ignore[call-overload]
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert "".join(texts) == whole.choices[0].message.content
