"""Where the app keeps its files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QCoreApplication, QStandardPaths
from PySide6.QtWidgets import QApplication

from app.core import paths


@pytest.fixture
def named(qapp: QApplication) -> Iterator[None]:
    """The application under its own name, as Qt's folders contain it."""
    before = QCoreApplication.applicationName()
    QCoreApplication.setApplicationName("Tandem")
    yield
    QCoreApplication.setApplicationName(before)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("has_variables", [False, True])
def test_folders_are_those_of_qt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_variables: bool
) -> None:
    """Files of earlier versions, which asked Qt, are found."""
    monkeypatch.delenv("TANDEM_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
        if has_variables:
            monkeypatch.setenv(name, str(tmp_path / name))
    place = QStandardPaths.StandardLocation

    def folder(location: QStandardPaths.StandardLocation) -> Path:
        return Path(QStandardPaths.writableLocation(location))

    assert paths.chats_dir() == folder(place.AppDataLocation) / "chats"
    assert paths.settings_file() == folder(place.AppConfigLocation) / "settings.json"
    assert paths.chat_caches_dir() == folder(place.CacheLocation) / "chat-caches"


def test_one_folder_holds_everything_if_it_is_named(home: Path) -> None:
    assert paths.chats_dir() == home / "chats"
    assert paths.settings_file() == home / "settings.json"
    assert paths.chat_caches_dir() == home / "chat-caches"


def test_a_user_without_a_home_still_gets_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TANDEM_HOME")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    assert paths.settings_file() == paths.NOWHERE / "settings.json"
