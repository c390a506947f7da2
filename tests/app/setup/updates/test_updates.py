"""A newer release: asked for after consent alone, told once, and never installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtGui import QDesktopServices
from pytestqt.qtbot import QtBot

from app.core.notice import Notice
from app.main import Shell
from app.setup.updates import update_session as session
from app.window.help.dialogs import AboutDialog
from tests.helpers.hostile_server import HostileServer, Mischief, hostile_server
from tests.helpers.shell_driver import MakeShell, banner

PAGE = "https://example.org/tandem/0.2.0"
PATH = "/release.json"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "FIRST_MS", 10)
    monkeypatch.setattr(session, "package_version", lambda: "0.1.0")


@pytest.fixture
def server() -> Iterator[HostileServer]:
    with hostile_server() as made:
        say(made, "0.2.0")
        yield made


def say(server: HostileServer, version: str) -> None:
    known = {"version": version, "page": PAGE, "news": "<b>Faster</b>"}
    server.files[PATH] = json.dumps(known).encode()


def use(shell: Shell, server: HostileServer, **more: object) -> None:
    """Set the address, and other settings."""
    address = f"{server.url}{PATH}"
    shell.keep(replace(shell.settings.current, release_address=address, **more))


def consent(shell: Shell, server: HostileServer) -> None:
    use(shell, server, checks_releases=True)


def about(shell: Shell) -> AboutDialog:
    shell.help.show_about()
    dialog = shell.help.about
    assert dialog is not None
    return dialog


def test_nothing_is_asked_without_consent(
    qtbot: QtBot, make_shell: MakeShell, server: HostileServer
) -> None:
    shell = make_shell()
    assert not shell.settings.current.checks_releases
    use(shell, server)
    about(shell)
    shell.settings_page.toggle()
    qtbot.wait(150)
    assert server.asked == []
    consent(shell, server)
    qtbot.waitUntil(lambda: len(server.asked) == 1)
    qtbot.waitUntil(lambda: banner(shell) != "")


def test_consent_that_is_taken_back_ends_the_looks(
    qtbot: QtBot, make_shell: MakeShell, server: HostileServer
) -> None:
    shell = make_shell()
    consent(shell, server)
    use(shell, server, checks_releases=False)
    qtbot.wait(100)
    assert server.asked == []


def test_a_closed_window_asks_no_more(
    qtbot: QtBot, make_shell: MakeShell, server: HostileServer
) -> None:
    shell = make_shell()
    shell.close()
    consent(shell, server)
    qtbot.wait(50)
    assert server.asked == []


def test_a_newer_release_is_told_quietly_and_opened_by_a_click_only(
    qtbot: QtBot, make_shell: MakeShell, server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(QDesktopServices, "openUrl", lambda url: opened.append(url.toString()))
    shell = make_shell()
    consent(shell, server)
    qtbot.waitUntil(lambda: banner(shell) == "Tandem 0.2.0 is available.")
    assert not shell.window.banner._timer.isActive(), "it stays until it is closed"
    shell.window.banner._action.click()
    dialog = shell.updates.dialog
    assert dialog is not None
    assert dialog.text.toPlainText() == "<b>Faster</b>"
    assert dialog.address.text() == PAGE
    assert "0.1.0" in dialog.head_line.text()
    assert opened == []
    dialog.visit.click()
    assert opened == [PAGE]


def test_it_is_asked_once_a_day_and_told_once(
    qtbot: QtBot, make_shell: MakeShell, server: HostileServer
) -> None:
    shell = make_shell()
    consent(shell, server)
    qtbot.waitUntil(lambda: banner(shell) != "")
    shell.window.close()
    again = make_shell()
    qtbot.waitUntil(lambda: banner(again) == "Tandem 0.2.0 is available.")  # not closed before
    again.window.banner._close()
    assert again.settings.current.dismissed_release == "0.2.0"
    again.window.close()
    third = make_shell()
    third.updates.session._look()
    assert banner(third) == ""
    assert len(server.asked) == 1
    say(server, "0.3.0")
    third.keep(replace(third.settings.current, releases_checked=0))
    third.updates.session._look()
    qtbot.waitUntil(lambda: banner(third) == "Tandem 0.3.0 is available.")


def test_no_newer_release_is_told_by_a_click_alone(
    qtbot: QtBot, make_shell: MakeShell, server: HostileServer
) -> None:
    shell = make_shell()
    use(shell, server)
    dialog = about(shell)
    assert not dialog.update_line.isVisibleTo(dialog)
    for version in ("0.1.0", "0.0.9", "0.2.0rc1"):
        say(server, version)
        dialog.show_update("", has_news=False)
        dialog.check.click()
        qtbot.waitUntil(lambda: dialog.update_line.text() == "This is the newest release.")
        assert not dialog.news.isVisibleTo(dialog)
    assert len(server.asked) == 3
    assert banner(shell) == ""


def test_a_click_asks_without_consent_and_shows_what_is_new(
    qtbot: QtBot, make_shell: MakeShell, server: HostileServer
) -> None:
    shell = make_shell()
    use(shell, server)
    dialog = about(shell)
    dialog.check.click()
    qtbot.waitUntil(lambda: dialog.news.isVisibleTo(dialog))
    assert dialog.update_line.text() == "Tandem 0.2.0 is available."
    assert banner(shell) == "", "nobody has agreed to be told"
    dialog.news.click()
    assert shell.updates.dialog is not None
    assert shell.updates.dialog.isVisible()


def test_failures_are_told_where_somebody_has_asked(
    qtbot: QtBot, make_shell: MakeShell, server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = make_shell()
    dialog = about(shell)
    dialog.check.click()
    assert "has no address" in dialog.update_line.text()
    server.plan = lambda _: Mischief(body=b"<html>")
    consent(shell, server)
    qtbot.waitUntil(lambda: "not valid" in dialog.update_line.text())
    assert banner(shell) == ""
    monkeypatch.setattr(session, "package_version", lambda: "")
    dialog.check.click()
    assert "has no version" in dialog.update_line.text()
    assert len(server.asked) == 1


def test_a_server_that_never_answers_blocks_nothing(
    qtbot: QtBot, make_shell: MakeShell, server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.setup.updates.source.LIMIT_S", 1.0)
    server.plan = lambda _: Mischief(stall_after=0)
    shell = make_shell()
    shell.updates.session._limit.setInterval(50)
    use(shell, server)
    dialog = about(shell)
    dialog.check.click()
    assert dialog.update_line.text() == "Checking …"
    qtbot.waitUntil(lambda: "does not respond" in dialog.update_line.text(), timeout=900)
    server.ended.set()


def test_other_notices_come_first(
    qtbot: QtBot, make_shell: MakeShell, server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.setup.updates.update_session.LATER_MS", 20)
    shell = make_shell()
    shell._notify(Notice("The model was lost.", kind="error"))
    consent(shell, server)
    qtbot.waitUntil(lambda: shell.updates.session.newer is not None)
    qtbot.wait(60)
    assert banner(shell) == "The model was lost."
    shell.window.banner.dismiss()
    qtbot.waitUntil(lambda: banner(shell) == "Tandem 0.2.0 is available.")


def test_a_changed_settings_file_does_no_harm(make_shell: MakeShell) -> None:
    shell = make_shell()
    for kept in ({"version": 3}, {"version": "0.2.0"}, {"version": "9", "page": "file:///etc"}):
        shell.keep(replace(shell.settings.current, newest_release=kept, checks_releases=True))
        shell.updates.session._look()
        assert shell.updates.session.newer is None
        assert banner(shell) == ""


def test_the_settings_say_what_is_missing(
    make_shell: MakeShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = make_shell()
    shell.settings_page.toggle()
    rows = shell.settings_page.view.rows
    shell.keep(replace(shell.settings.current, checks_releases=True))
    assert "no default address" in rows["checks_releases"]._problem.text()
    bundled = tmp_path / "release-address.txt"
    bundled.write_text("https://example.org/release.json\n")
    monkeypatch.setattr("app.setup.updates.release.ADDRESS_FILE", bundled)
    shell.keep(replace(shell.settings.current, zoom=110))
    assert rows["checks_releases"]._problem.text() == ""
    assert shell.updates.session.address == "https://example.org/release.json"
    shell.keep(replace(shell.settings.current, release_address="http://example.org/"))
    assert "https://" in rows["release_address"]._problem.text()
    shell.keep(replace(shell.settings.current, checks_releases=False))
