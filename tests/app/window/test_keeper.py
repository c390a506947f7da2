"""Changed settings are saved automatically, and a slow disk does not block the window."""

import threading
from dataclasses import replace

import pytest
from pytestqt.qtbot import QtBot

from app.core.paths import settings_file
from app.core.settings import SettingsStore
from tests.helpers.shell_driver import MakeShell


def test_settings_are_written_beside_the_window(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = make_shell()
    has_begun, may_end, write = threading.Event(), threading.Event(), SettingsStore.save

    def slow(store: SettingsStore) -> bool:
        has_begun.set()
        assert may_end.wait(10)
        return write(store)

    monkeypatch.setattr(SettingsStore, "save", slow)
    shell.keep(replace(shell.settings.current, server_port=12345))
    qtbot.waitUntil(has_begun.is_set)
    may_end.set()
    qtbot.waitUntil(lambda: SettingsStore(settings_file()).current.server_port == 12345)
