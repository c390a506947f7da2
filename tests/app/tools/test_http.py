"""The hub against servers at addresses: both forms of HTTP, keys, wrong addresses, lost servers."""

import logging
from collections.abc import Iterator

import pytest

from app.tools.server_store import ToolLimits, ToolResult, ToolServer
from tests.helpers.mcp_server import served_over_http
from tests.helpers.tool_hubs import WatchedHub, watched_hub

# of streams that the package leaves to be collected when a connection is lost
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

LIMITS = ToolLimits(start_s=30, silence_s=30)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served_over_http(has_key=True) as found:
        yield found


@pytest.fixture
def hub() -> Iterator[WatchedHub]:
    with watched_hub(LIMITS) as made:
        yield made


def test_tools_at_an_address_are_called_with_the_secret_header(address: str) -> None:
    def headers_of(server: ToolServer) -> dict[str, str]:
        assert server.headers == {"Authorization": ""}
        return {"Authorization": "Bearer open"}

    with watched_hub(LIMITS, headers_of=headers_of) as hub:
        (state,) = hub.settled(ToolServer("far", url=address, headers={"Authorization": ""}))
        assert state.status == "ready", state.problem
        assert hub.call("far__add", {"a": 1, "b": 2}) == ToolResult("3")
        assert hub.call("far__echo", {"text": "Grüße 🐼"}) == ToolResult("Grüße 🐼")


def test_without_a_key_the_server_says_no(
    hub: WatchedHub, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (state,) = hub.settled(ToolServer("far", url=address, headers={"Authorization": "Bearer x"}))
    sentence = "far denied access (401). It may need an “Authorization” header."
    assert (state.status, state.problem) == ("failed", sentence)
    assert "Bearer" not in caplog.text


def test_a_wrong_path_is_a_sentence(hub: WatchedHub, address: str) -> None:
    server = ToolServer("far", url=f"{address}/x", headers={"Authorization": "Bearer open"})
    (state,) = hub.settled(server)
    assert state.problem == "far returned status 404. Check its address."


def test_an_address_where_nobody_is(hub: WatchedHub) -> None:
    (state,) = hub.settled(ToolServer("far", url="http://127.0.0.1:9/mcp"))
    assert state.problem.startswith("http://127.0.0.1:9/mcp cannot be reached: ")


def test_a_server_of_the_older_form_that_goes_and_comes_back(hub: WatchedHub) -> None:
    with served_over_http(form="sse") as found:
        (state,) = hub.settled(ToolServer("old", url=found))
        assert state.status == "ready", state.problem
        assert hub.call("old__add", {"a": 1, "b": 2}) == ToolResult("3")
    result = hub.call("old__add", {"a": 1, "b": 2})
    assert result.is_error
    hub.wait(lambda: hub.state("old").status == "failed")


def test_a_server_that_has_gone_is_a_sentence(hub: WatchedHub) -> None:
    with served_over_http() as found:
        hub.settled(ToolServer("far", url=found))
        assert hub.call("far__add", {"a": 1, "b": 2}) == ToolResult("3")
    result = hub.call("far__add", {"a": 1, "b": 2})
    assert result.is_error
    assert result.text.startswith(f"{found} cannot be reached: ")
