"""The window's server: on, off, started again after a change, and beside an engine that ends."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import pytest
from pytestqt.qtbot import QtBot

from app.core.engine_client import EngineClient
from app.core.settings import Settings, SettingsStore
from app.server.page.choices import choices_of, own_address, read_pages
from app.server.page.log_view import LogView
from app.server.page.session import ServerSession
from engine import EngineCrashed, EngineError, LoadParams
from tests.helpers.fake_host import FakeHost, Script

QUESTION = {"messages": [{"role": "user", "content": "Hi"}]}
OPENER = build_opener(ProxyHandler({}))

Answer = tuple[int, str]
"""Status and text of a response."""


def ask(address: str, **headers: str) -> Answer:
    """Ask for an answer in whole."""
    sent = {"Content-Type": "application/json", **headers}
    url = f"{address}/v1/chat/completions"
    try:
        with OPENER.open(Request(url, json.dumps(QUESTION).encode(), sent), timeout=20) as reply:
            text = json.load(reply)["choices"][0]["message"]["content"]
            return reply.status, text
    except HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]["message"]


def started(qtbot: QtBot, session: ServerSession) -> str:
    """Switch the server on, wait for it, and return its address."""
    session.switch(True)
    qtbot.waitUntil(lambda: not session.is_changing, timeout=20_000)
    assert session.address, session.problem
    return session.address


def changed(qtbot: QtBot, session: ServerSession, **values: object) -> None:
    """Change settings, and wait for the server that is started again."""
    before = session._running
    session.change(**values)
    qtbot.waitUntil(lambda: session._running is not before and not session.is_changing)


def test_programs_use_the_windows_model_while_it_is_on(
    qtbot: QtBot, session: ServerSession
) -> None:
    assert not session.is_wanted, "off by default"
    address = started(qtbot, session)
    assert ask(address) == (200, "Hello from the **fake** model.")
    session.switch(False)
    qtbot.waitUntil(lambda: not session.address)
    with pytest.raises(OSError, match="refused"):
        ask(address)


def test_without_a_model_it_says_so_and_serves_the_next_one(
    qtbot: QtBot, session: ServerSession, client: EngineClient
) -> None:
    address = started(qtbot, session)
    with qtbot.waitSignal(client.unloaded):
        client.unload()
    assert ask(address) == (503, "No model is loaded. Open one in Tandem.")
    with qtbot.waitSignal(client.loaded):
        client.load(LoadParams("/models/other.gguf"))
    assert ask(address)[0] == 200
    with OPENER.open(f"{address}/v1/models", timeout=20) as reply:
        assert [one["id"] for one in json.load(reply)["data"]] == ["other"]


def test_it_survives_the_loss_of_the_engine(
    qtbot: QtBot, session: ServerSession, client: EngineClient, script: Script
) -> None:
    address = started(qtbot, session)
    script.answer_error, script.loses_model = EngineCrashed("The engine has ended.", ""), True
    with qtbot.waitSignal(client.lost):
        assert ask(address) == (503, "The engine has ended. Load the model again in Tandem.")
    assert ask(address) == (503, "No model is loaded. Open one in Tandem.")
    script.answer_error = None
    with qtbot.waitSignal(client.loaded):
        client.load(LoadParams("/models/tiny.gguf"))
    assert ask(address)[0] == 200


def test_refusals_name_what_the_window_has(qtbot: QtBot, session: ServerSession) -> None:
    address = started(qtbot, session)
    told = {
        name: ask(address, **{name: value})
        for name, value in {"Origin": "http://evil.example", "Host": "evil.example"}.items()
    }
    assert {status for status, _ in told.values()} == {403}
    assert "under “Allow web pages (CORS)”" in told["Origin"][1]
    assert "under “Server”" in told["Host"][1]
    assert "--" not in str(told), "no options of a command"


def test_a_taken_port_is_a_sentence_and_another_one_works(
    qtbot: QtBot, session: ServerSession
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        session.change(server_port=port)
        session.switch(True)
        qtbot.waitUntil(lambda: bool(session.problem), timeout=20_000)
    assert session.problem == (f"Port {port} of 127.0.0.1 is already in use. Choose another port.")
    assert not session.is_wanted
    assert not session.is_changing
    session.change(server_port=0)
    assert ask(started(qtbot, session))[0] == 200
    assert session.problem == ""


def test_a_change_starts_it_again(qtbot: QtBot, session: ServerSession) -> None:
    started(qtbot, session)
    changed(qtbot, session, server_needs_key=True)
    assert len(session.key) >= 24
    assert ask(session.address)[0] == 401
    assert ask(session.address, Authorization=f"Bearer {session.key}")[0] == 200
    old = session.key
    session.renew_key()
    qtbot.waitUntil(lambda: session.key != old and not session.is_changing)
    assert ask(session.address, Authorization=f"Bearer {old}")[0] == 401
    changed(qtbot, session, server_needs_key=False)
    page = "http://localhost:3000"
    assert ask(session.address, Origin=page)[0] == 403
    changed(qtbot, session, server_for_pages=True, server_pages=(page,))
    assert ask(session.address, Origin=page)[0] == 200


def test_on_a_network_it_always_has_a_key(
    qtbot: QtBot, session: ServerSession, ring: dict[str, str]
) -> None:
    started(qtbot, session)
    changed(qtbot, session, server_on_network=True)
    assert session.address.startswith(f"http://{own_address()}:")
    here = f"http://127.0.0.1:{session.address.rpartition(':')[2]}"
    assert ask(here)[0] == 401
    assert list(ring.values()) == [session.key]
    assert ask(here, Authorization=f"Bearer {session.key}")[0] == 200


def test_the_key_is_the_same_after_a_restart(
    qtbot: QtBot, session: ServerSession, client: EngineClient, store: SettingsStore
) -> None:
    session.change(server_needs_key=True)
    qtbot.waitUntil(lambda: bool(session.key))
    again = ServerSession(client, store, store.put, client)
    again.want_key()
    qtbot.waitUntil(lambda: again.key == session.key)
    again.close()


def test_closing_ends_answers_within_two_seconds(
    qtbot: QtBot, session: ServerSession, client: EngineClient, script: Script
) -> None:
    script.hold, script.hold_after = True, 1
    address, ends = started(qtbot, session), list[str]()

    def wait_for_answer() -> None:
        try:
            ask(address)
        except (OSError, ValueError) as error:
            ends.append(type(error).__name__)

    asking = threading.Thread(target=wait_for_answer)
    asking.start()
    qtbot.waitUntil(lambda: client.sharing.n_running == 1)
    start = time.monotonic()
    session.close()
    assert time.monotonic() - start < 2.0
    asking.join(10)
    assert ends
    qtbot.waitUntil(lambda: client.sharing.n_running == 0)


def test_it_starts_with_the_window_if_that_is_wanted(
    qtbot: QtBot, session: ServerSession, store: SettingsStore
) -> None:
    session.begin()
    assert not session.is_wanted
    store.put(replace(store.current, server_at_start=True))
    session.begin()
    assert not session.is_wanted, "only the first time"
    session._has_begun = False
    session.begin()
    qtbot.waitUntil(lambda: bool(session.address), timeout=20_000)


def test_requests_are_copied_while_they_run(
    qtbot: QtBot, session: ServerSession, script: Script, client: EngineClient
) -> None:
    address, views = started(qtbot, session), list[LogView]()
    session.viewed.connect(views.append)
    ask(address)
    script.hold, script.hold_after = True, 2
    asking = threading.Thread(target=ask, args=(address,))
    asking.start()
    qtbot.waitUntil(lambda: client.sharing.n_running == 1)

    def is_writing() -> bool:
        session.look()
        return bool(views) and views[-1].requests[0].phase == "writing"

    qtbot.waitUntil(is_writing)
    running, ended = views[-1].requests
    assert (running.number, ended.number) == (2, 1)
    assert (running.status, ended.status) == (0, 200)
    assert ended.route == "POST /v1/chat/completions"
    assert ended.n_tokens == 8
    assert views[-1].n_running == 1
    assert [(c.client, c.n_tokens) for c in views[-1].clients] == [("127.0.0.1", 8)]
    assert isinstance(client._host, FakeHost)
    client._host.let_go(script)
    asking.join(10)


# what a person chooses


def test_a_network_needs_a_key_whatever_the_file_says() -> None:
    choices = choices_of(Settings(server_on_network=True))
    assert choices.needs_key
    assert choices.host == "0.0.0.0"
    assert choices_of(Settings()).host == "127.0.0.1"
    assert choices_of(Settings(server_pages=("https://a.org",))).pages == (), "switched off"


@pytest.mark.parametrize(
    ("text", "pages"),
    [
        ("", ()), ("*", ("*",)), ("https://A.org/chat", ("https://a.org",)),
        ("http://localhost:3000, https://a.org:443", ("http://localhost:3000", "https://a.org")),
        ("http://[::1]:80  http://[::1]", ("http://[::1]",)),
    ],
)  # fmt: skip
def test_pages_are_read_as_browsers_name_them(text: str, pages: tuple[str, ...]) -> None:
    assert read_pages(text) == pages


@pytest.mark.parametrize(
    "text", ["localhost", "file:///a", "https://", "http://a:99999", "http://me@a.org", "http://[a"]
)
def test_what_is_no_page_is_named(text: str) -> None:
    with pytest.raises(EngineError, match="is not a valid web page origin"):
        read_pages(text)
