"""What a server says about releases: read without trust, in little time and memory."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from app.setup.updates.release import is_newer, is_web_page, parse_release
from app.setup.updates.source import MAX_BYTES, fetch_release
from engine import EngineError
from tests.helpers.hostile_server import Asked, HostileServer, Mischief, hostile_server

GOOD = {"version": "0.2.0", "page": "https://example.org/tandem", "news": "- Faster\n- Smaller"}
PATH = "/release.json"


@pytest.fixture
def server() -> Iterator[HostileServer]:
    with hostile_server() as made:
        made.files[PATH] = json.dumps(GOOD).encode()
        yield made


@pytest.mark.parametrize(
    ("found", "own", "expected"),
    [
        ("0.2.0", "0.1.0", True),
        ("0.10.0", "0.9.9", True),
        ("0.1.0", "0.1.0", False),
        ("0.1", "0.1.0", False),
        ("0.1.0", "0.2.0", False),
        ("0.2.0rc1", "0.1.0", False),
        ("0.2.0.dev3", "0.1.0", False),
        ("0.2.0rc2", "0.2.0rc1", True),
        ("0.2.0", "0.2.0rc1", True),
        ("0.2.0.post1", "0.2.0", True),
        ("0.2.0", "0.2.0+local", False),
        ("0.2.0", "", False),
        ("latest", "0.1.0", False),
    ],
)
def test_versions_are_compared(found: str, own: str, expected: bool) -> None:
    assert is_newer(found, own) is expected


def test_an_answer_is_read() -> None:
    release = parse_release(json.dumps(GOOD | {"of a later Tandem": [1]}).encode())
    assert (release.version, release.page) == ("0.2.0", "https://example.org/tandem")
    assert release.news == "- Faster\n- Smaller"


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"\xff\xfe\x00", b"null", b"[]", b"{}", b"<html>login</html>", b"[" * 50_000,
        b'{"version": ' + b"9" * 20_000 + b"}",
        json.dumps(GOOD | {"version": 2}).encode(),
        json.dumps(GOOD | {"version": "newest"}).encode(),
        json.dumps(GOOD | {"version": "1." * 5000 + "1"}).encode(),
        json.dumps(GOOD | {"version": "0.2.0+evil"}).encode(),
        json.dumps(GOOD | {"page": None}).encode(),
        json.dumps(GOOD | {"page": "http://example.org"}).encode(),
        json.dumps(GOOD | {"page": "javascript:alert(1)"}).encode(),
        json.dumps(GOOD | {"page": "https://bank.example@evil.example/"}).encode(),
        json.dumps(GOOD | {"page": "file:///etc/passwd"}).encode(),
        json.dumps(GOOD | {"page": "https://exam\u202eple.org"}).encode(),
        json.dumps(GOOD | {"news": ["x"]}).encode(),
    ],
)  # fmt: skip
def test_rubbish_is_a_sentence(answer: bytes) -> None:
    with pytest.raises(EngineError, match="not valid"):
        parse_release(answer)


def test_news_are_cut_and_cannot_act() -> None:
    release = parse_release(json.dumps(GOOD | {"news": "\x1b[2J\u202e<b>" + "x" * 50_000}).encode())
    assert len(release.news) <= 8001
    assert release.news.startswith("\ufffd[2J\ufffd<b>x")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("https://example.org/a?b#c", True),
        ("https://example.org:8443/", True),
        ("https://example.org:x/", False),
        ("https:///a", False),
        ("https://[::1", False),
        ("https://example.org/\\@evil", False),
        ("ftp://example.org/", False),
        ("https://" + "a" * 400, False),
    ],
)
def test_only_plain_web_pages_are_shown(address: str, expected: bool) -> None:
    assert is_web_page(address) is expected


# --- over the network


def test_a_request_sends_nothing_of_the_person(server: HostileServer) -> None:
    release = fetch_release(f"{server.url}{PATH}")
    assert release.version == "0.2.0"
    assert [(one.path, one.query, one.token) for one in server.asked] == [(PATH, "", "")]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://example.org/r.json", "cannot be used for"),
        ("ftp://example.org/r.json", "cannot be used for"),
        ("file:///etc/passwd", "cannot be used for"),
        ("https://user:secret@example.org/", "cannot be used for"),
        ("nonsense", "cannot be used for"),
        ("https://", "cannot be used for"),
        ("http://127.0.0.1:1/r.json", "cannot be reached"),
    ],
)
def test_other_addresses_are_not_asked(address: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        fetch_release(address)


@pytest.mark.parametrize(
    ("mischief", "message"),
    [
        (Mischief(status=404), "error 404"),
        (Mischief(status=503), "error 503"),
        (Mischief(body=b"<html>"), "not valid"),
        (Mischief(body=b" " * (MAX_BYTES + 1)), "too long"),
        (Mischief(body=b"x", length=10**12), "reached|respond"),
        (Mischief(cut_after=5), "reached"),
        (Mischief(location="http://example.org/r.json"), "cannot be used for"),
        (Mischief(location="file:///etc/passwd"), "cannot be used for"),
        (Mischief(location=PATH), "too many times"),
        (Mischief(headers={"Content-Encoding": "gzip"}, body=b"\x1f\x8b"), "not valid"),
    ],
)
def test_a_hostile_server_is_a_sentence(
    server: HostileServer, mischief: Mischief, message: str
) -> None:
    server.plan = lambda _: mischief
    with pytest.raises(EngineError, match=message):
        fetch_release(f"{server.url}{PATH}", limit_s=1.0)
    assert len(server.asked) <= 4


@pytest.mark.parametrize("proxy", ["nonsense://127.0.0.1", "socks5://127.0.0.1:1", "http://["])
def test_a_proxy_that_is_not_understood_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(EngineError, match=r"cannot be (reached|asked)"):
        fetch_release("https://example.invalid/release.json", limit_s=1.0)


def test_a_redirect_to_the_right_place_is_followed(server: HostileServer) -> None:
    def plan(asked: Asked) -> Mischief | None:
        return Mischief(location=PATH) if asked.path == "/newest" else None

    server.plan = plan
    assert fetch_release(f"{server.url}/newest").version == "0.2.0"


def test_an_answer_in_drops_is_given_up(server: HostileServer) -> None:
    server.plan = lambda _: Mischief(body=b" " * 60_000, pause_s=0.25)
    start = time.monotonic()
    with pytest.raises(EngineError, match="does not respond"):
        fetch_release(f"{server.url}{PATH}", limit_s=0.4)
    assert time.monotonic() - start < 3


def test_a_silent_server_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(EngineError, match="does not respond"):
            fetch_release(f"http://127.0.0.1:{port}/", limit_s=0.3)
