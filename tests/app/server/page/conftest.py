"""A window's server before a scripted engine, with a keyring in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from PySide6.QtCore import QObject
from pytestqt.qtbot import QtBot

from app.core import paths
from app.core.engine_client import EngineClient
from app.core.settings import SettingsStore
from app.server.page.session import ServerSession
from engine import LoadParams
from tests.helpers.fake_host import FakeHost, Script

PARAMS = LoadParams("/models/tiny.gguf")


@pytest.fixture(autouse=True)
def own_ring(ring: dict[str, str]) -> None:
    """Keep keys out of the system's keyring."""


@pytest.fixture
def parent() -> QObject:
    return QObject()


@pytest.fixture
def client(qtbot: QtBot, parent: QObject, script: Script) -> Iterator[EngineClient]:
    """Yield a client with a loaded model."""
    made = EngineClient(lambda on_event: FakeHost(on_event, script), parent)
    with qtbot.waitSignal(made.loaded):
        made.load(PARAMS)
    yield made
    made.shutdown()


@pytest.fixture
def store() -> SettingsStore:
    """Return settings with a port that is free."""
    made = SettingsStore(paths.settings_file())
    made.put(replace(made.current, server_port=0))
    return made


@pytest.fixture
def session(client: EngineClient, store: SettingsStore, parent: QObject) -> Iterator[ServerSession]:
    made = ServerSession(client, store, store.put, parent)
    yield made
    made.close()
