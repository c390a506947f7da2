"""A window that talks to a server over real sockets: the dialog, chats, losses, the monitor."""

import json
from collections.abc import Iterator

import pytest
from pytestqt.qtbot import QtBot

from app.core import paths
from app.core.engine_client import EngineState
from app.main import Shell
from app.remote.client.address import KeyStore, RemoteAddress, parse_url
from app.remote.page.connecting import RemoteDialog
from engine import Load, Unload
from tests.helpers.fake_openai import DONE, Asked, FakeOpenAI, Reply, ended, fake_openai, said
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner, host_of, shown

METRICS = """\
tandem_answers_running 2
tandem_answers_waiting 1
tandem_completion_tokens_per_second 23.5
tandem_kv_cache_tokens 8192
tandem_kv_cache_used_tokens 4096
"""


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with fake_openai() as made:
        yield made


pytestmark = pytest.mark.usefixtures("ring")


def dialog_of(shell: Shell) -> RemoteDialog:
    """Open the dialog and return it."""
    actions = {action.text(): action for action in shell.window.model_bar.menu.actions()}
    actions["Remote model…"].trigger()
    assert shell.remote.connecting is not None
    assert shell.remote.connecting.dialog is not None
    return shell.remote.connecting.dialog


def list_models(qtbot: QtBot, dialog: RemoteDialog, server: FakeOpenAI, key: str = "") -> None:
    dialog.address.setCurrentText(server.url)
    dialog.key.setText(key)
    dialog.list_.click()
    qtbot.waitUntil(lambda: bool(dialog.selected), timeout=10_000)


def path_of(shell: Shell) -> str:
    """Return the path or address of the loaded model; "" for none."""
    model = shell.client.model
    return "" if model is None or shell.client.state is EngineState.LOADING else model.info.path


def connect(qtbot: QtBot, shell: Shell, server: FakeOpenAI) -> None:
    shell.models.open(RemoteAddress(f"{server.url}/v1", "small").path)
    qtbot.waitUntil(lambda: shell.client.model is not None, timeout=10_000)


def test_a_model_is_found_connected_and_answers(
    qtbot: QtBot, make_shell: MakeShell, server: FakeOpenAI, ring: dict[str, str]
) -> None:
    shell = make_shell()
    dialog = dialog_of(shell)
    list_models(qtbot, dialog, server, "sk-secret")
    assert dialog.selected == "small"
    assert server.asked[-1].headers["authorization"] == "Bearer sk-secret"
    dialog.connect_.click()
    qtbot.waitUntil(lambda: shell.client.model is not None, timeout=10_000)
    ask(qtbot, shell, "Hi")
    assert shown(shell) == ["Hi", "Hello from afar."]
    bar = shell.window.model_bar
    assert bar._full_name == f"small – 127.0.0.1:{server.server_port}"
    assert (bar._loaded.text(), bar._button.text()) == ("● connected", "Disconnect")
    assert "nothing to split here" in shell.split_panel.summary.note.text()
    assert not shell.split_panel.footer.load.isEnabled()
    assert ring == {f"{server.url}/v1": "sk-secret"}
    shell.keeper.close()
    kept = json.loads(paths.settings_file().read_text())
    assert kept["servers"] == [f"{server.url}/v1"]
    assert "sk-secret" not in json.dumps(kept)
    stats = shell.session.current.messages[-1].stats
    assert stats is not None
    assert (stats.n_tokens, stats.context_tokens) == (3, 10)


def test_the_engine_frees_its_model_and_comes_back(
    qtbot: QtBot, make_shell: MakeShell, server: FakeOpenAI
) -> None:
    shell = make_shell()
    there = RemoteAddress(f"{server.url}/v1", "small").path

    def use(path: str) -> None:
        shell.models.open(path)
        qtbot.waitUntil(lambda: path_of(shell) == path, timeout=10_000)

    use(MODEL)
    use(there)
    assert isinstance(host_of(shell).commands[-1], Unload)
    ask(qtbot, shell, "Hi")
    assert len(server.answered) == 1
    use(MODEL)
    assert isinstance(host_of(shell).commands[-1], Load)
    qtbot.waitUntil(lambda: "nothing to split" not in shell.split_panel.summary.note.text())
    assert shell.settings.current.recent_models == (MODEL, there)


def test_a_thought_is_folded_and_not_sent_again(
    qtbot: QtBot, make_shell: MakeShell, server: FakeOpenAI
) -> None:
    def plan(asked: Asked) -> Reply | None:
        return (
            Reply([said("Hm.", "reasoning_content"), said("Yes."), ended(), DONE])
            if asked.body
            else None
        )

    server.plan = plan
    shell = make_shell()
    connect(qtbot, shell, server)
    ask(qtbot, shell, "One?")
    message = shell.session.current.messages[-1]
    assert message.content == "<think>\nHm.\n</think>\n\nYes."
    assert message.thought_s is not None
    ask(qtbot, shell, "Two?")
    assert [m["content"] for m in server.answered[-1]["messages"]] == ["One?", "Yes.", "Two?"]


def test_a_stop_keeps_what_has_come(
    qtbot: QtBot, make_shell: MakeShell, server: FakeOpenAI
) -> None:
    server.plan = lambda asked: Reply([said("Once")], is_open=True) if asked.body else None
    shell = make_shell()
    connect(qtbot, shell, server)
    shell.window.composer.edit.setPlainText("Tell")
    shell.window.composer.submit()
    qtbot.waitUntil(lambda: shown(shell)[-1:] == ["Once"], timeout=10_000)
    shell.session.stop()
    qtbot.waitUntil(lambda: shell.session.current.messages[-1].stats is not None)
    assert shell.session.current.messages[-1].stats.reason == "cancelled"
    server.ended.set()


def test_a_server_that_vanishes_is_told_and_one_click_goes_on(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell()
    with fake_openai() as server:
        port = server.server_port
        connect(qtbot, shell, server)
    shell.window.composer.edit.setPlainText("Hi")
    shell.window.composer.submit()
    qtbot.waitUntil(lambda: "cannot be reached" in banner(shell), timeout=10_000)
    notice = shell.window.banner.notice
    assert notice is not None
    assert notice.action == "Reconnect and continue"
    with fake_openai(port):
        assert notice.on_action is not None
        notice.on_action()
        qtbot.waitUntil(lambda: shown(shell)[-1:] == ["Hello from afar."], timeout=10_000)
        qtbot.waitUntil(lambda: not len(shell.client.answers))


def test_the_monitor_has_the_figures_of_a_tandem_and_asks_no_other(
    qtbot: QtBot, make_shell: MakeShell, server: FakeOpenAI
) -> None:
    shell = make_shell()
    connect(qtbot, shell, server)
    assert not [one for one in server.asked if one.path == "/metrics"]
    assert shell.monitor.server.isHidden()
    server.models, server.metrics = [{"id": "small", "owned_by": "tandem"}], METRICS
    shell.models.load()
    qtbot.waitUntil(lambda: not shell.monitor.server.isHidden(), timeout=10_000)
    line = shell.monitor.server.accessibleName()
    figures = "23.5 tokens/s · 2 running · 1 waiting · KV cache 50 %"
    assert line == f"127.0.0.1:{server.server_port}: {figures}"
    shell.models.eject()
    qtbot.waitUntil(shell.monitor.server.isHidden)


def test_a_key_in_the_open_is_warned_of(qtbot: QtBot, make_shell: MakeShell) -> None:
    dialog = dialog_of(make_shell())
    dialog.address.setCurrentText("http://nas:11435")
    assert dialog.warning.text() == "Without https, others on the network can read your messages."
    dialog.key.setText("sk-1")
    assert dialog.warning.text().endswith("read your messages and the key.")
    for private in ("https://nas:11435", "http://127.0.0.1:11435"):
        dialog.address.setCurrentText(private)
        assert dialog.warning.isHidden()
    dialog.reject()


def test_a_failure_is_shown_in_the_dialog(
    qtbot: QtBot, make_shell: MakeShell, server: FakeOpenAI
) -> None:
    dialog = dialog_of(make_shell())
    for typed, sentence in (
        ("ftp://x", "not a valid server address"),
        (server.url, "requires an API key"),
    ):
        server.plan = lambda _: Reply(status=401)
        dialog.address.setCurrentText(typed)
        dialog.list_.click()
        qtbot.waitUntil(lambda s=sentence: s in dialog.status.text(), timeout=10_000)
        assert not dialog.connect_.isEnabled()
    dialog.reject()


def test_a_silent_server_does_not_hold_up_the_dialog(
    qtbot: QtBot, make_shell: MakeShell, server: FakeOpenAI
) -> None:
    server.plan = lambda _: Reply([b"{"], is_open=True, kind="application/json")
    shell = make_shell()
    dialog = dialog_of(shell)
    dialog.address.setCurrentText(server.url)
    dialog.list_.click()
    qtbot.waitUntil(lambda: bool(server.asked), timeout=10_000)
    dialog.reject()
    shell.remote.close()  # waits for the thread, which has ended


def test_a_server_and_its_key_are_forgotten(
    qtbot: QtBot, make_shell: MakeShell, server: FakeOpenAI, ring: dict[str, str]
) -> None:
    shell = make_shell()
    address = parse_url(server.url)
    KeyStore(paths.api_keys_file()).put(address, "sk-1")
    shell.keep(shell.settings.current.with_server(address.url))
    connect(qtbot, shell, server)
    dialog = dialog_of(shell)
    assert dialog.address.currentText() == address.url
    assert dialog.key.placeholderText().startswith("A key is saved")
    assert not dialog.forget.isHidden()
    dialog.forget.click()
    qtbot.waitUntil(lambda: not ring)
    assert not shell.settings.current.servers
    assert not shell.settings.current.recent_models
    assert dialog.address.count() == 0
    dialog.reject()
