"""The server page in the running window, the chip in its bar, and the end of both."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QLineEdit
from pytestqt.qtbot import QtBot

from app.core.paths import api_keys_file, settings_file
from app.main import Shell
from app.server.page.log_view import LogView
from app.server.page.request_table import CLIENT
from app.server.page.server_panel import ServerPanel, state_text
from app.widgets.buttons import IconButton
from app.window import auto_load as idle
from tests.app.server.page.test_session import ask
from tests.helpers.fake_host import Script
from tests.helpers.server_views import WRITING, server_view
from tests.helpers.shell_driver import MODEL, MakeShell, host_of


@pytest.fixture
def shell(make_shell: MakeShell) -> Shell:
    """Return a window with a loaded model, whose server would take any port."""
    made = make_shell(model=MODEL)
    made.keep(replace(made.settings.current, server_port=0))
    return made


def opened(qtbot: QtBot, shell: Shell) -> ServerPanel:
    """Open the page by its button in the rail."""
    (rail,) = [
        found for found in shell.window._rail.findChildren(IconButton)
        if found.accessibleName() == "Server for other programs"
    ]  # fmt: skip
    rail.click()
    qtbot.waitUntil(lambda: shell.side_panels.server.isVisible())
    return shell.side_panels.server


def switched_on(qtbot: QtBot, shell: Shell, panel: ServerPanel) -> str:
    panel.press()
    qtbot.waitUntil(lambda: bool(shell.serving.address), timeout=20_000)
    return shell.serving.address


def rows(panel: ServerPanel) -> list[list[str]]:
    model = panel.table.rows
    return [
        [model.index(row, column).data() for column in range(model.columnCount())]
        for row in range(model.rowCount())
    ]


def said(panel: ServerPanel) -> str:
    return panel.main._help.text()


def test_a_person_switches_it_on_and_sees_who_asks(
    qtbot: QtBot, shell: Shell, script: Script
) -> None:
    panel = opened(qtbot, shell)
    assert said(panel) == "Off. Other programs cannot use the model."
    assert not shell.window.server.isVisible()
    address = switched_on(qtbot, shell, panel)
    assert said(panel) == "Waiting for requests"
    assert shell.window.server.text() == "Server on"
    panel.address.copy_button.click()
    assert QGuiApplication.clipboard().text() == f"{address}/v1"
    assert f"{address}/v1/chat/completions" in panel.example._text.text()
    script.hold, script.hold_after = True, 2
    asking = threading.Thread(target=ask, args=(address,))
    asking.start()
    qtbot.waitUntil(lambda: said(panel).startswith("Answering 1 request"))
    qtbot.waitUntil(lambda: bool(rows(panel)) and rows(panel)[0][2] == "writing")
    assert rows(panel)[0][1] == "chat/completions"
    host_of(shell).let_go(script)
    asking.join(10)
    qtbot.waitUntil(lambda: rows(panel)[0][2] == "200")
    assert panel.clients.text() == "127.0.0.1: 8 tokens so far"
    assert shell.window.chat_view.shown == [], "the chats are left alone"
    shell.models.eject()
    qtbot.waitUntil(lambda: said(panel) == "On, but no model is loaded")
    panel.press()
    qtbot.waitUntil(lambda: not shell.window.server.isVisible())
    assert rows(panel)[0][2] == "200", "what was asked stays in sight"


def test_the_network_needs_a_key_which_no_settings_file_has(qtbot: QtBot, shell: Shell) -> None:
    panel = opened(qtbot, shell)
    access = panel.access
    assert access.key.isHidden()
    access.network.press()
    qtbot.waitUntil(lambda: bool(access.key.edit.text()))
    key = access.key.edit.text()
    assert access.needs_key.is_on
    assert not access.needs_key._switch.isEnabled()
    assert access.key.edit.echoMode() is QLineEdit.EchoMode.Password
    access.show_key.click()
    assert access.key.edit.echoMode() is QLineEdit.EchoMode.Normal
    access.key.copy_button.click()
    assert QGuiApplication.clipboard().text() == key
    access.new_key.click()
    qtbot.waitUntil(lambda: access.key.edit.text() != key)
    assert "YOUR_KEY" in panel.example._text.text()
    access.network.press()
    assert access.needs_key._switch.isEnabled()
    assert access.key.isHidden()
    shell.settings.save()
    files = settings_file().read_text() + api_keys_file().read_text()
    assert shell.serving.key not in files


def test_web_pages_are_checked_where_they_are_typed(qtbot: QtBot, shell: Shell) -> None:
    access = opened(qtbot, shell).access
    assert access.pages.isHidden()
    access.for_pages.press()
    access.pages.setFocus()
    qtbot.keyClicks(access.pages, "localhost:3000")
    qtbot.keyClick(access.pages, Qt.Key.Key_Return)
    assert access.pages_problem.text().startswith("“localhost:3000” is not a valid web page")
    assert shell.settings.current.server_pages == ()
    access.pages.setText("http://localhost:3000/")
    qtbot.keyClick(access.pages, Qt.Key.Key_Return)
    assert access.pages_problem.isHidden()
    assert shell.serving.choices.pages == ("http://localhost:3000",)


def test_a_closed_window_serves_no_more(qtbot: QtBot, shell: Shell, script: Script) -> None:
    """Nor does it wait for the answers that are being written."""
    address = switched_on(qtbot, shell, opened(qtbot, shell))
    script.hold, script.hold_after = True, 1
    failed = list[Exception]()

    def wait_for_answer() -> None:
        try:
            ask(address)
        except (OSError, ValueError) as error:
            failed.append(error)

    asking = threading.Thread(target=wait_for_answer)
    asking.start()
    qtbot.waitUntil(lambda: shell.client.sharing.n_running == 1)
    start = time.monotonic()
    shell.serving.close()
    assert time.monotonic() - start < 2.0
    shell.window.close()
    asking.join(10)
    assert failed


def test_a_model_that_programs_use_is_not_idle(
    qtbot: QtBot, shell: Shell, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "MINUTE_MS", 100)
    script.hold, script.hold_after = True, 1
    address = switched_on(qtbot, shell, opened(qtbot, shell))
    asking = threading.Thread(target=ask, args=(address,))
    asking.start()
    qtbot.waitUntil(lambda: shell.client.sharing.n_running == 1)
    shell.keep(replace(shell.settings.current, unload_after_min=1))
    qtbot.wait(300)
    assert shell.client.model is not None
    host_of(shell).let_go(script)
    asking.join(10)
    qtbot.waitUntil(lambda: shell.client.model is None)


def test_figures_are_told_in_words() -> None:
    assert state_text(LogView()) == "Waiting for requests"
    assert state_text(server_view()) == "Answering 3 requests, 40.9 tok/s"


def test_rows_say_what_a_request_is_doing(qtbot: QtBot) -> None:
    panel = ServerPanel()
    qtbot.addWidget(panel)
    view = server_view()
    panel.show_view(view)
    assert [row[2] for row in rows(panel)] == ["writing", "writing", "waiting", "200", "401", "499"]
    assert not panel.table.isColumnHidden(CLIENT)
    tip = panel.table.rows.index(4, 0).data(Qt.ItemDataRole.ToolTipRole)
    assert "The key is missing or wrong." in tip
    panel.show_view(LogView((replace(WRITING, phase="reading", read_part=0.456),)))
    assert rows(panel)[0][2] == "reading 46 %"
    assert panel.table.isColumnHidden(CLIENT), "there is only one"
