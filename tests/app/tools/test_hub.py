"""The hub against real programs: what they offer, what comes of calls, how they end."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.tools.server_store import ToolLimits, ToolResult, ToolServer
from tests.helpers.tool_hubs import WatchedHub, plain_server, watched_hub

REAL = ToolServer("My tools", (sys.executable, "-m", "tests.helpers.mcp_server"))


@pytest.fixture(scope="module")
def real() -> Iterator[WatchedHub]:
    """A hub with a server of the package `mcp`, which takes a second to start."""
    environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", os.getcwd()), "GIVEN": "here"}
    with watched_hub() as hub:
        hub.settled(replace(REAL, environment=environment))
        yield hub


@pytest.fixture
def hub() -> Iterator[WatchedHub]:
    with watched_hub(ToolLimits(start_s=30, silence_s=30)) as made:
        yield made


def test_nothing_runs_before_a_server_is_on() -> None:
    code = (
        "import sys, threading\n"
        "from app.tools import hub, results, server_store\n"
        "from app.tools.server_store import ToolLimits, ToolServer\n"
        "made = hub.ToolHub(print)\n"
        "made.set_servers([ToolServer('a', ('nothing',), is_on=False)])\n"
        "assert made.states()[0].status == 'off'\n"
        "assert threading.active_count() == 1\n"
        "late = {'mcp', 'mcp_types', 'pydantic', 'httpx2', 'anyio'}\n"
        "assert not late & set(sys.modules), late & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def test_tools_are_listed(real: WatchedHub) -> None:
    state = real.state("My tools")
    assert (state.status, state.problem) == ("ready", "")
    add, echo, *_ = state.tools
    assert (add.server, add.name, add.title, add.is_read_only) == (
        "My tools",
        "add",
        "Add up",
        True,
    )
    assert (add.tool.name, add.tool.description) == ("My_tools__add", "Add two numbers.")
    assert '"required": ["a", "b"]' in add.tool.parameters
    assert (echo.title, echo.is_read_only) == ("echo", None)
    assert real.hub.offered() == state.tools


@pytest.mark.parametrize(
    ("tool", "arguments", "result"),
    [
        ("add", {"a": 2, "b": 3}, ToolResult("5")),
        ("echo", {"text": "Grüße 🐼\n\u202eabc"}, ToolResult("Grüße 🐼\n\ufffdabc")),
        ("picture", {}, ToolResult("A dot:\n[Picture: image/png, 4 bytes]")),
        ("echo", {"text": ""}, ToolResult("[The tool returned nothing.]")),
        ("fail", {}, ToolResult("Error executing tool fail: out of cheese", is_error=True)),
        ("variable", {"name": "GIVEN"}, ToolResult("here")),
        ("variable", {"name": "TANDEM_HOME"}, ToolResult("none")),
    ],
)  # fmt: skip
def test_a_call_has_a_result(
    real: WatchedHub, tool: str, arguments: dict[str, object], result: ToolResult
) -> None:
    assert real.call(f"My_tools__{tool}", arguments) == result


def test_wrong_arguments_are_an_error_for_the_model(real: WatchedHub) -> None:
    result = real.call("My_tools__add", {"a": "x", "b": 1})
    assert result.is_error
    assert "valid integer" in result.text


def test_a_huge_result_is_cut(real: WatchedHub) -> None:
    result = real.call("My_tools__huge", {"n": 3_000_000})
    assert (
        result.text == "x" * (256 << 10) + "\n[Truncated: the first 262144 of 3000000 characters.]"
    )


def test_tools_that_change_are_listed_again(real: WatchedHub) -> None:
    assert real.call("My_tools__grow") == ToolResult("grown")
    real.wait(lambda: real.hub.offered()[-1].name == "another echo")
    assert real.call("My_tools__another_echo", {"text": "hello"}) == ToolResult("hello")


def test_progress_keeps_a_call_alive_and_silence_ends_it() -> None:
    with watched_hub(ToolLimits(silence_s=3.0)) as hub:
        hub.settled(plain_server())
        assert hub.call("plain__slow", {"text": "done"}) == ToolResult("done")
        late = "plain has not responded for 3 s, so the call was cancelled."
        assert hub.call("plain__wait") == ToolResult(late, is_error=True)
        assert hub.call("plain__echo", {"text": "on"}) == ToolResult("on")


def test_hidden_tools_and_servers_that_are_off_are_not_offered(hub: WatchedHub) -> None:
    server = plain_server(hidden=("die", "grow"))
    hub.settled(server)
    assert [tool.name for tool in hub.hub.offered()] == ["echo", "wait", "ask", "slow"]
    assert len(hub.state("plain").tools) == 6
    n = hub.changes
    hub.hub.set_servers([replace(server, hidden=())])  # connected as before
    assert len(hub.hub.offered()) == 6
    hub.wait(lambda: hub.changes > n)
    assert hub.state("plain").status == "ready"
    hub.hub.set_servers([replace(server, is_on=False)])
    assert hub.hub.offered() == ()
    assert hub.state("plain").status == "off"


def test_servers_with_one_name_for_models_keep_their_tools_apart(hub: WatchedHub) -> None:
    hub.settled(plain_server("a b"), plain_server("a/b"))
    names = [tool.tool.name for tool in hub.hub.offered() if tool.name == "echo"]
    assert names == ["a_b__echo", "a_b_2__echo"]
    assert hub.call("a_b_2__echo", {"text": "hi"}) == ToolResult("hi")


def test_a_server_that_dies_says_why_and_is_started_by_the_next_call(hub: WatchedHub) -> None:
    hub.settled(plain_server())
    problem = "The program for plain has exited. Its last output: out of cheese"
    assert hub.call("plain__die") == ToolResult(problem, is_error=True)
    hub.wait(lambda: hub.state("plain").status == "failed")
    assert (hub.state("plain").problem, hub.hub.offered()) == (problem, ())
    assert hub.call("plain__echo", {"text": "again"}) == ToolResult("again")
    assert hub.state("plain").status == "ready"


def test_a_server_can_be_started_again(hub: WatchedHub) -> None:
    (state,) = hub.settled(ToolServer("none", ("no-such-program", "x")))
    assert (state.status, state.problem) == ("failed", "The program no-such-program was not found.")
    n = hub.changes
    hub.hub.restart("none")
    hub.wait(lambda: hub.changes > n and hub.state("none").status == "failed")
    assert hub.call("none__x") == ToolResult(state.problem, is_error=True)


def test_a_folder_that_is_not_there_is_named(hub: WatchedHub, tmp_path: Path) -> None:
    (state,) = hub.settled(plain_server(folder=str(tmp_path / "gone")))
    assert state.problem == f"plain cannot run in {tmp_path / 'gone'}: No such file or directory."


def test_a_server_that_only_knows_the_old_greeting_is_greeted_so(hub: WatchedHub) -> None:
    (state,) = hub.settled(plain_server(way="picky"))
    assert state.status == "ready", state.problem


def test_tools_that_change_are_listed_again_by_the_old_protocol(hub: WatchedHub) -> None:
    hub.settled(plain_server())
    hub.call("plain__grow")
    hub.wait(lambda: hub.hub.offered()[-1].name == "new")


def test_what_a_server_asks_of_the_model_is_declined(hub: WatchedHub) -> None:
    hub.settled(plain_server())
    assert hub.call("plain__ask") == ToolResult("Sampling not supported")


def test_a_server_that_hangs_and_one_that_prints_rubbish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.1)
    with watched_hub(ToolLimits(start_s=4.0)) as hub:
        ways = plain_server("hung", "hang"), plain_server("loud", "rubbish")
        hung, loud = hub.settled(*ways)
    assert hung.problem == "hung did not respond in time."
    assert loud.problem == "loud printed text instead of MCP messages."


def test_a_call_can_be_stopped_and_the_server_is_told(hub: WatchedHub, tmp_path: Path) -> None:
    told = tmp_path / "told"
    hub.settled(plain_server(way=str(told)))
    call, result = hub.begin("plain__wait")
    hub.call("plain__echo")  # so the other has begun
    call.cancel()
    assert result() == ToolResult("The call was stopped.", is_error=True)
    until = time.monotonic() + 30
    while not told.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert told.exists()
    assert hub.call("plain__echo", {"text": "on"}) == ToolResult("on")
    call.cancel()  # without effect


def test_closing_ends_calls_and_later_ones_say_so() -> None:
    with watched_hub() as hub:
        hub.settled(plain_server())
        _, result = hub.begin("plain__wait")
        hub.call("plain__echo")
    assert result() == ToolResult("plain was stopped.", is_error=True)
    assert hub.call("plain__echo") == ToolResult("Tandem is closing.", is_error=True)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends them at once")
def test_a_stubborn_program_and_its_children_are_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.1)
    monkeypatch.setattr("mcp.client.stdio.FORCE_KILL_TIMEOUT", 0.1)
    noted = tmp_path / "child"
    with watched_hub() as hub:
        hub.settled(plain_server(way=f"stubborn={noted}"))
        child = int(noted.read_text())
        os.kill(child, 0)
    until = time.monotonic() + 30
    while _is_alive(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _is_alive(child)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_no_such_tool(hub: WatchedHub) -> None:
    hub.settled(plain_server())
    assert hub.call("other__echo") == ToolResult("There is no tool other__echo.", is_error=True)
    assert hub.call("plain__none") == ToolResult("plain has no tool plain__none.", is_error=True)
