"""A server with OpenAI's interface on this machine, which can also answer in every wrong way."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EVENTS = "text/event-stream"


@dataclass
class Asked:
    """A request that has arrived."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Reply:
    """An answer: status, headers, and the bytes of its body one write after the other.

    Attributes:
        is_open: whether the connection stays open behind the last one, until the server ends.
    """

    chunks: Iterable[bytes] = ()
    status: int = 200
    kind: str = EVENTS
    headers: dict[str, str] = field(default_factory=dict)
    is_open: bool = False


def event(chunk: object) -> bytes:
    """Return a chunk of a streamed answer."""
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def said(text: str, part: str = "content") -> bytes:
    """Return the chunk of a text."""
    return event({"choices": [{"index": 0, "delta": {part: text}}]})


def ended(reason: str = "stop") -> bytes:
    return event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


def counted(prompt: int, completion: int, cached: int = 0) -> bytes:
    usage = {
        "prompt_tokens": prompt, "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip
    return event({"choices": [], "usage": usage})


DONE = b"data: [DONE]\n\n"


class FakeOpenAI(ThreadingHTTPServer):
    """Server of one model.

    Attributes:
        asked: all requests so far.
        models: entries of its list of models.
        plan: returns the answer to a request; None for the usual one.
        ended: set when it closes.
    """

    daemon_threads = False  # closing waits for all of them

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.asked: list[Asked] = []
        self.models: list[Any] = [{"id": "small", "object": "model", "owned_by": "someone"}]
        self.plan: Callable[[Asked], Reply | None] = lambda _: None
        self.metrics = ""
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def answered(self) -> list[Any]:
        """Bodies of the requests for answers."""
        return [one.body for one in self.asked if one.path.endswith("completions")]

    def usual(self, asked: Asked) -> Reply:
        """Return the answer of a server that does nothing wrong."""
        if asked.path == "/v1/models":
            document = {"object": "list", "data": self.models}
            return Reply([json.dumps(document).encode()], kind="application/json")
        if asked.path == "/v1/chat/completions":
            words = [said("Hello"), said(" from"), said(" afar.")]
            return Reply([*words, ended(), counted(7, 3), DONE])
        if asked.path == "/metrics" and self.metrics:
            return Reply([self.metrics.encode()], kind="text/plain")
        if asked.path == "/tokenize":
            tokens = list(range(len(asked.body["content"].split())))
            return Reply([json.dumps({"tokens": tokens}).encode()], kind="application/json")
        if asked.path == "/apply-template":
            words = " ".join(f"<{m['role']}> {m['content']}" for m in asked.body["messages"])
            return Reply([json.dumps({"prompt": words}).encode()], kind="application/json")
        return Reply([b'{"error": {"message": "no such thing"}}'], 404, "application/json")

    def handle_error(self, *_: object) -> None:
        """Say nothing: clients that hang up are part of the tests."""

    def close(self) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()


@contextmanager
def fake_openai(port: int = 0) -> Iterator[FakeOpenAI]:
    """Run a server until the end of the block."""
    server = FakeOpenAI(port)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 5.0
    server: FakeOpenAI

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _answer(self, body: Any) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.path, headers, body)
        self.server.asked.append(asked)
        reply = self.server.plan(asked) or self.server.usual(asked)
        self.close_connection = True
        self.send_response(reply.status)
        for name, value in {"Content-Type": reply.kind, "Connection": "close"}.items():
            self.send_header(name, value)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        for chunk in reply.chunks:
            self.wfile.write(chunk)
        if reply.is_open:
            self.server.ended.wait(20)

    def log_message(self, *_: object) -> None:
        pass
