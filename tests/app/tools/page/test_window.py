"""The dialog of tool servers in a window, with real programs behind it."""

import json
import sys
from collections.abc import Callable

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QMessageBox
from pytestqt.qtbot import QtBot

from app.core import paths
from app.main import Shell
from app.tools.page.server_form import ADDRESS, JSON, PROGRAM, ServerForm
from app.tools.page.tool_dialog import ServerCard, ToolDialog, ToolPanel
from app.tools.server_store import ToolResult, ToolServer, join_command
from tests.helpers.mcp_server import served_over_http
from tests.helpers.shell_driver import MakeShell, banner
from tests.helpers.tool_hubs import PLAIN, plain_server

WAIT_MS = 60_000


pytestmark = pytest.mark.usefixtures("ring")


def panel_of(shell: Shell) -> ToolPanel:
    """Return the panel among the settings."""
    panel = shell.window.findChild(ToolPanel)
    assert panel is not None
    return panel


def dialog_of(shell: Shell) -> ToolDialog:
    """Open the dialog from the settings, and return it."""
    shell.settings_page.toggle()
    panel_of(shell).change.click()
    assert shell.tool_presenter.dialog is not None
    return shell.tool_presenter.dialog


def form_of(shell: Shell) -> ServerForm:
    assert shell.tool_presenter.form is not None
    return shell.tool_presenter.form


def add_program(shell: Shell, dialog: ToolDialog, server: ToolServer) -> ServerCard:
    """Type a server of a program."""
    dialog.add.click()
    form = form_of(shell)
    form.name.setText(server.name)
    form.command.setText(join_command(server.command))
    form.save.click()
    return dialog.cards[server.name]


def kept() -> dict[str, dict[str, object]]:
    """Return the servers of the file."""
    found = json.loads(paths.tool_servers_file().read_text(encoding="utf-8"))
    servers: dict[str, dict[str, object]] = found["mcpServers"]
    return servers


def until(qtbot: QtBot, is_so: Callable[[], bool]) -> None:
    qtbot.waitUntil(is_so, timeout=WAIT_MS)


def test_a_program_is_added_used_and_removed(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = make_shell()
    dialog = dialog_of(shell)
    assert dialog.nothing.isVisible()
    card = add_program(shell, dialog, plain_server())
    until(qtbot, lambda: card.status.text() == "Ready")
    assert not dialog.nothing.isVisible()
    assert card.head.text() == "6 tools"
    card.head.click()
    assert card.tools["die"].isVisible()
    card.tools["die"].click()
    assert "die" not in [tool.name for tool in shell.tools.offered]
    assert card.head.text() == "5 of 6 tools"
    assert panel_of(shell).text.text() == "1 server on, 5 tools"
    results: list[ToolResult] = []
    shell.tools.call("plain__echo", {"text": "hi"}, results.append)
    until(qtbot, lambda: results == [ToolResult("hi")])
    card.switch.click()
    assert card.status.text() == "Off"
    assert shell.tools.offered == ()
    until(qtbot, lambda: paths.tool_servers_file().exists() and "disabled" in kept()["plain"])
    assert kept()["plain"]["hiddenTools"] == ["die"]
    yes = QMessageBox.StandardButton.Yes
    monkeypatch.setattr(QMessageBox, "question", lambda *_: yes)
    card.remove.click()
    assert dialog.nothing.isVisible()
    until(qtbot, lambda: not kept())


def test_servers_are_there_again_after_a_restart(qtbot: QtBot, make_shell: MakeShell) -> None:
    words = [sys.executable, "-I", str(PLAIN), ""]
    entry = {"command": words[0], "args": words[1:], "hiddenTools": ["die"]}
    paths.tool_servers_file().parent.mkdir(parents=True)
    paths.tool_servers_file().write_text(json.dumps({"mcpServers": {"plain": entry}}))
    shell = make_shell()
    until(qtbot, lambda: len(shell.tools.offered) == 5)


def test_a_program_that_dies_is_told_and_started_again(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    dialog = dialog_of(shell)
    card = add_program(shell, dialog, plain_server())
    until(qtbot, lambda: card.status.text() == "Ready")
    shell.tools.call("plain__die", {}, lambda _: None)
    problem = "The program for plain has exited. Its last output: out of cheese"
    until(qtbot, lambda: card.status.text() == problem)
    assert not card.head.isVisible()
    card.restart.click()
    until(qtbot, lambda: card.status.text() == "Ready")


def test_what_will_not_do_is_said_in_the_form(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    dialog = dialog_of(shell)
    add_program(shell, dialog, ToolServer("gone", ("no-such-program",)))
    until(qtbot, lambda: dialog.cards["gone"].status.text().startswith("The program no-such"))
    dialog.add.click()
    form = form_of(shell)

    def says(sentence: str) -> None:
        form.save.click()
        assert form.problem.text() == sentence

    says("A server needs a name of at most 64 characters.")
    form.name.setText("gone")
    says("Another server is already named gone.")
    form.name.setText("new")
    says("new needs a command or an address.")
    form.command.setText("npx 'a")
    says("A quote in the command is not closed.")
    form.command.setText("npx")
    form.variables.setPlainText("KEY")
    says("“KEY” does not have the form NAME=VALUE.")
    form.tabs.setCurrentIndex(ADDRESS)
    form.url.setText("example.org")
    says("example.org is not a valid http:// or https:// address.")
    form.tabs.setCurrentIndex(JSON)
    assert not form.name.isVisible()
    form.json.setPlainText("npx")
    says("This is not valid JSON: Expecting value: line 1 column 1 (char 0).")
    form.json.setPlainText('{"mcpServers": {"a": {"command": "no-such-a"}, "b": {"url": "x:"}}}')
    says("x: is not a valid http:// or https:// address.")
    form.json.setPlainText('{"mcpServers": {"a": {"command": "no-such-a"}}}')
    form.save.click()
    assert list(dialog.cards) == ["gone", "a"]
    assert shell.tool_presenter.form is None


def test_values_of_headers_are_secrets_that_stay_at_an_edit(
    qtbot: QtBot, make_shell: MakeShell, ring: dict[str, str]
) -> None:
    shell = make_shell()
    dialog = dialog_of(shell)
    dialog.add.click()
    form = form_of(shell)
    form.name.setText("far")
    form.tabs.setCurrentIndex(ADDRESS)
    form.url.setText("http://127.0.0.1:9/mcp")
    form.headers.setPlainText("Authorization: Bearer s3\nX-ThreadPool: a")
    form.save.click()
    until(qtbot, lambda: "far" in dialog.cards)
    until(qtbot, lambda: "cannot be reached" in dialog.cards["far"].status.text())
    assert ring == {"headers of far": '{"Authorization": "Bearer s3", "X-ThreadPool": "a"}'}
    assert "s3" not in paths.tool_servers_file().read_text()
    dialog.cards["far"].edit.click()
    form = form_of(shell)
    assert form.tabs.currentIndex() == ADDRESS != PROGRAM
    assert form.headers.toPlainText() == "Authorization: \nX-ThreadPool: "
    form.name.setText("near")
    form.headers.setPlainText("Authorization:\nX-ThreadPool: b")
    qtbot.keyClick(form.url, Qt.Key.Key_Return)
    until(qtbot, lambda: "near" in dialog.cards)
    assert ring == {"headers of near": '{"Authorization": "Bearer s3", "X-ThreadPool": "b"}'}
    assert list(dialog.cards) == ["near"]
    assert banner(shell) == ""


def test_a_new_secret_is_used_at_once(qtbot: QtBot, make_shell: MakeShell) -> None:
    with served_over_http(has_key=True) as address:
        shell = make_shell()
        session = shell.tools
        session.put(ToolServer("far", url=address, headers={"Authorization": "Bearer wrong"}))
        until(qtbot, lambda: [state.status for state in session.states] == ["failed"])
        right = ToolServer("far", url=address, headers={"Authorization": "Bearer open"})
        session.put(right, "far")
        until(qtbot, lambda: session.states[0].status == "ready")
        session.switch("far", False)
        shell.tools.close()
