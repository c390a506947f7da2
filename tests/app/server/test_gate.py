"""Tests of who may ask a server: hosts, web pages and keys."""

from collections.abc import Iterator

import httpx2
import pytest
from openai import AuthenticationError

from app.server.settings import ServerSettings
from app.server.web.access import check_settings
from engine import EngineError
from tests.helpers.served import EngineOnThread, Served

KEY = "correct horse battery"
PAGE = "http://localhost:3000"


@pytest.fixture(scope="module")
def guarded(demo_engine: EngineOnThread) -> Iterator[Served]:
    """A server with a key, which one web page may ask."""
    with Served(demo_engine, key=KEY, origins=(PAGE,), hosts=("Nas.home",)) as server:
        yield server


@pytest.fixture
def bare(guarded: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=guarded.address, trust_env=False) as client:
        yield client


@pytest.mark.parametrize(
    "host", ["localhost", "localhost.:80", "127.0.0.1:1", "[::1]:9", "LOCALHOST", "nas.home:2"]
)
def test_names_of_this_machine_are_known(bare: httpx2.Client, host: str) -> None:
    assert bare.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "localhost.evil.example", "", "192.168.0.9", "127.0.0.1.nip.io", "[x",
        "[::1%25evil.example]", "[::1%evil.example]:80",
    ],
)  # fmt: skip
def test_another_name_is_refused(bare: httpx2.Client, host: str) -> None:
    """A web page's owner can have a name of its own lead to this machine (DNS rebinding)."""
    response = bare.get("/health", headers={"host": host, "authorization": f"Bearer {KEY}"})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"},
        {"x-api-key": KEY[:-1]}, {"authorization": KEY}, {"x-api-key": "ü"},
    ],
    ids=str,
)  # fmt: skip
def test_without_the_key_nothing_is_told(bare: httpx2.Client, headers: dict[str, str]) -> None:
    encoded = {name: value.encode() for name, value in headers.items()}
    for path in ("/v1/models", "/metrics", "/slots", "/openapi.json", "/nowhere"):
        response = bare.get(path, headers=encoded)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert bare.get("/health").json() == {"status": "ok"}


def test_the_key_opens_in_both_headers(guarded: Served, bare: httpx2.Client) -> None:
    assert bare.get("/v1/models", headers={"x-api-key": KEY}).status_code == 200
    with guarded.client() as client:
        assert client.models.list().data
    with guarded.client(api_key="wrong") as client, pytest.raises(AuthenticationError):
        client.models.list()


def test_a_listed_page_may_ask_and_read(bare: httpx2.Client) -> None:
    wish = {
        "origin": PAGE, "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }  # fmt: skip
    allowed = bare.options("/v1/chat/completions", headers=wish)
    assert allowed.status_code == 204
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert allowed.headers["access-control-allow-headers"] == "authorization,content-type"
    found = bare.get("/v1/models", headers={"origin": PAGE, "x-api-key": KEY})
    assert found.headers["access-control-allow-origin"] == PAGE
    assert found.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in found.headers
    wrong = bare.get("/v1/models", headers={"origin": PAGE})
    assert wrong.headers["access-control-allow-origin"] == PAGE, "the page can read the refusal"


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost:3000"])
def test_another_page_may_not_even_ask(bare: httpx2.Client, origin: str) -> None:
    """Browsers send some requests before they ask, and only keep the answer from the page."""
    response = bare.post(
        "/v1/chat/completions", headers={"origin": origin, "x-api-key": KEY}, content=b"{}"
    )
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers
    wish = {"origin": origin, "access-control-request-method": "POST"}
    assert bare.options("/v1/chat/completions", headers=wish).status_code == 403


def test_a_page_of_the_server_itself_may_ask(bare: httpx2.Client, guarded: Served) -> None:
    headers = {"origin": guarded.address, "x-api-key": KEY}
    assert bare.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.9", "::"])
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(EngineError, match="needs a key"):
        check_settings(ServerSettings(host=host))
    check_settings(ServerSettings(host=host, key=KEY))
    check_settings(ServerSettings(host="127.0.0.1"))
    with pytest.raises(EngineError, match="at least 8"):
        check_settings(ServerSettings(key="short"))
