import json
import logging
import stat
from pathlib import Path

import keyring.errors
import pytest

from app.remote.client.address import KeyStore, RemoteAddress
from engine import EngineError

NAS, CLOUD = RemoteAddress("http://nas:11435/v1", "small"), RemoteAddress("https://cloud/v1")


@pytest.fixture
def no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: str) -> None:
        raise keyring.errors.NoKeyringError("none here")

    for name in ("get_password", "set_password", "delete_password"):
        monkeypatch.setattr(f"keyring.{name}", fail)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config" / "api-keys.json"


def test_a_key_is_kept_by_the_keyring_for_its_server(ring: dict[str, str], file: Path) -> None:
    assert KeyStore(file).put(NAS, " sk-1\n") == "keyring"
    assert ring == {NAS.url: "sk-1"}
    assert "sk-1" not in file.read_text()
    again = KeyStore(file)
    assert again.has(NAS)
    assert again.get(NAS) == "sk-1"
    assert again.get(CLOUD) == ""
    again.put(NAS, "")
    assert not ring
    assert not KeyStore(file).has(NAS)


def test_no_keyring_is_asked_about_servers_without_a_key(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    def fail(*_: str) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr("keyring.get_password", fail)
    assert KeyStore(file).get(NAS) == ""


@pytest.mark.usefixtures("no_ring")
def test_without_a_keyring_a_file_of_this_user_has_the_key(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert KeyStore(file).put(NAS, "sk-1") == "file"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert KeyStore(file).get(NAS) == "sk-1"
    KeyStore(file).put(NAS, "")
    assert json.loads(file.read_text()) == {}
    assert "sk-1" not in caplog.text


@pytest.mark.usefixtures("no_ring")
@pytest.mark.parametrize("data", [b"{", b"[1]", b'{"http://nas:11435/v1": 5}', b"[" * 99_999])
def test_a_damaged_file_has_no_keys(file: Path, data: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(data)
    store = KeyStore(file)
    assert store.get(NAS) == ""
    assert store.put(NAS, "sk-1") == "file"


@pytest.mark.usefixtures("no_ring")
def test_what_cannot_be_written_is_used_until_the_end(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("a file in the way")
    store = KeyStore(tmp_path / "config" / "api-keys.json")
    assert store.put(NAS, "sk-1") == "nowhere"
    assert store.get(NAS) == "sk-1"


@pytest.mark.parametrize("text", ["sk-ü", "x" * 5000, "sk-\x01"])
def test_what_cannot_be_sent_is_no_key(file: Path, text: str) -> None:
    with pytest.raises(EngineError, match="not an API key") as caught:
        KeyStore(file).put(NAS, text)
    assert text not in str(caught.value)
