"""What people paste, what the hub answers, and what a model's header tells before it is fetched."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.models.downloads.hub.client import Hub, TokenStore, fetch_header
from app.models.downloads.hub.offers import (
    Address,
    find_offer,
    hub_endpoint,
    is_offline,
    offers,
    parse_address,
    quant_of,
)
from app.models.downloads.transfer.source import Denied, RemoteFile, Source
from engine import EngineError, is_header_whole
from engine.model.architectures.info import read_model_info
from tests.helpers.fake_hub import COMMIT, add_repository, start_hub
from tests.helpers.hollow import hollow_llama
from tests.helpers.hostile_server import HostileServer, Mischief, hostile_server
from tests.helpers.tiny_gguf import tiny_gguf


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileServer]:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with hostile_server() as made:
        start_hub(made)
        yield made


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("llama 3 8b", None),
        ("llama", None),
        ("", None),
        ("acme/Tiny-1.5B-GGUF", Address("acme/Tiny-1.5B-GGUF")),
        (" acme/tiny:Q4_K_M ", Address("acme/tiny", "Q4_K_M")),
        ("hf.co/acme/tiny:Q4_K_M", Address("acme/tiny", "Q4_K_M")),
        ("https://huggingface.co/acme/tiny", Address("acme/tiny")),
        ("https://huggingface.co/acme/tiny/tree/main", Address("acme/tiny", revision="main")),
        (
            "https://huggingface.co/acme/tiny/blob/main/sub/t%20x.gguf?download=true",
            Address("acme/tiny", path="sub/t x.gguf", revision="main"),
        ),
        ("https://example.org/m/x.gguf", Address(url="https://example.org/m/x.gguf")),
        ("http://127.0.0.1:81/acme/tiny", Address("acme/tiny")),
        ("https://example.org/m/x.exe", None),
        ("https://me:word@example.org/x.gguf", None),
        ("https://huggingface.co/models?search=x", None),
        ("https://huggingface.co/..%2f../etc", None),
        ("acme/../tiny", None),
        ("../tiny", None),
        ("acme/tiny.gguf", None),
        ("file:///etc/x.gguf", None),
        ("https://[::1", None),
    ],
)
def test_what_is_pasted_is_understood(text: str, address: Address | None) -> None:
    assert parse_address(text, "http://127.0.0.1:81") == address


def test_the_environment_names_the_hub_and_forbids_the_network() -> None:
    assert hub_endpoint({}) == "https://huggingface.co"
    assert hub_endpoint({"HF_ENDPOINT": "https://mirror.example/"}) == "https://mirror.example"
    assert [is_offline({"HF_HUB_OFFLINE": text}) for text in ("1", "yes", "0", "")] == [
        True, True, False, False,
    ]  # fmt: skip


def remote(name: str, size: int = 10) -> RemoteFile:
    return RemoteFile(f"https://hub/{name}", name, size, "", "acme/tiny", "1")


def test_files_become_offers_with_their_parts_and_helpers() -> None:
    names = [
        "README.md", "tiny-Q8_0.gguf", "tiny-UD-Q4_K_XL.gguf", "imatrix.gguf", "mmproj-F32.gguf",
        "mmproj-F16.gguf", "BF16/tiny-BF16-00002-of-00002.gguf",
        "BF16/tiny-BF16-00001-of-00002.gguf", "Q2_K/tiny-Q2_K-00001-of-00002.gguf",
    ]  # fmt: skip
    found = offers([remote(name, 100 - n) for n, name in enumerate(names)])
    assert [(offer.quant, len(offer.parts)) for offer in found] == [
        ("UD-Q4_K_XL", 1), ("Q8_0", 1), ("BF16", 2),
    ]  # fmt: skip
    assert [part.name[-19:] for part in found[2].parts] == [
        "-00001-of-00002.gguf"[-19:], "-00002-of-00002.gguf"[-19:],
    ]  # fmt: skip
    assert {offer.helpers[0].name for offer in found} == {"mmproj-F16.gguf"}
    assert find_offer(found, "q8_0", "") == found[1]
    assert find_offer(found, "", "tiny-UD-Q4_K_XL.gguf") == found[0]
    assert find_offer(found, "Q3_K", "") is None
    assert [quant_of(name) for name in ("a-IQ4_XS", "qwen3-8b", "x.f16", "Q4-tiny-Q5_K_M")] == [
        "IQ4_XS", "", "F16", "Q5_K_M",
    ]  # fmt: skip


def test_a_search_tells_what_is_known_of_each_repository(server: HostileServer) -> None:
    add_repository(server, "acme/tiny-GGUF", {"tiny-Q8_0.gguf": b"GGUF"})
    add_repository(server, "acme/closed-GGUF", {}, gated="manual")
    found = Hub(server.url, lambda: "").search("CLOSED")
    assert [(one.repo, one.is_gated, one.n_params) for one in found] == [
        ("acme/closed-GGUF", True, 135_000_000)
    ]
    assert found[0].updated is not None
    assert found[0].updated.year == 2026
    assert len(server.asked) == 1
    assert "filter=gguf" in server.asked[0].query


def test_a_repository_has_files_with_size_hash_and_state(server: HostileServer) -> None:
    add_repository(server, "acme/tiny-GGUF", {"tiny-Q8_0.gguf": b"GGUF1", "README.md": b"x"})
    found = Hub(server.url, lambda: "hf_secret").repository("acme/tiny-GGUF")
    (file,) = found.files
    assert (file.n_bytes, file.commit, len(file.sha256)) == (5, COMMIT, 64)
    assert file.url == f"{server.url}/acme/tiny-GGUF/resolve/{COMMIT}/tiny-Q8_0.gguf"
    assert found.licence == "apache-2.0"
    assert {asked.token for asked in server.asked} == {"Bearer hf_secret"}


@pytest.mark.parametrize(
    ("mischief", "words"),
    [
        (Mischief(status=404, headers={"X-Error-Code": "RepoNotFound"}), "no repository acme/x"),
        (Mischief(status=403, headers={"X-Error-Code": "GatedRepo"}), "acme/x is gated"),
        (Mischief(status=401, body=b"{}"), "no repository acme/x|rejected your token"),
        (Mischief(status=500), r"is busy \(status 500\)"),
        (Mischief(status=429), r"is busy \(status 429\)"),
        (Mischief(status=418), "error 418"),
        (Mischief(status=200, body=b"<html>"), "invalid response"),
        (Mischief(status=200, body=b"[]"), "invalid response"),
        (Mischief(status=200, body=b'{"id": 3, "siblings": 5}'), "invalid response"),
        (Mischief(status=200, body=b"[" * 100_000), "invalid response"),
        (Mischief(cut_after=3, status=200, body=b"{}{}{}"), "cannot be reached"),
        (Mischief(stall_after=0, status=200, body=b"{}"), "does not respond"),
    ],
)
def test_each_failure_of_the_hub_is_a_sentence_without_the_token(
    server: HostileServer,
    mischief: Mischief,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("app.models.downloads.hub.client.ANSWER_S", 0.5)
    server.plan = lambda _: mischief
    with pytest.raises(EngineError, match=words) as caught:
        Hub(server.url, lambda: "hf_secret").repository("acme/x")
    assert "hf_secret" not in f"{caught.value} {caught.value.hint} {caplog.text}"
    assert len(server.asked) == 1  # the person may try again; nothing does it by itself


def test_nothing_is_asked_where_the_network_is_forbidden(
    server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EngineError, match="HF_HUB_OFFLINE is set"):
        Hub(server.url, lambda: "").search("x")
    assert not server.asked


def test_a_header_is_fetched_without_the_model(server: HostileServer, tmp_path: Path) -> None:
    """A hole of 4 GB stands for the weights: it is never asked for."""
    model = hollow_llama(tmp_path / "big.gguf")
    size = model.stat().st_size
    with model.open("rb") as file:
        head = file.read(1 << 20)
    assert size > 4e9
    server.plan = lambda asked: Mischief(
        status=206, body=head[asked.start or 0 : asked.end],
        headers={"Content-Range": f"bytes {asked.start}-{(asked.end or 0) - 1}/{size}"},
    )  # fmt: skip
    folder = tmp_path / "header"
    folder.mkdir()
    source = Source(server.url)
    part = RemoteFile(f"{server.url}/m", "big.gguf", size)
    path = fetch_header(source, [part], folder)
    source.close()
    assert read_model_info(path).n_params == read_model_info(model).n_params
    assert path.stat().st_size == size
    assert len(server.asked) == 1


def test_a_header_longer_than_the_first_bytes_is_fetched_on(
    server: HostileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.models.downloads.hub.client.FIRST_BYTES", 512)
    data = tiny_gguf(tmp_path / "tiny.gguf", n_layer=2).read_bytes()
    assert not is_header_whole(data[:512], len(data))
    server.files["/m"] = data
    folder = tmp_path / "header"
    folder.mkdir()
    source = Source(server.url)
    path = fetch_header(source, [RemoteFile(f"{server.url}/m", "m.gguf", len(data))], folder)
    source.close()
    assert read_model_info(path).n_layer == 2
    starts = [asked.start or 0 for asked in server.asked]
    assert starts[:2] == [0, 512]
    assert sum((asked.end or 0) - (asked.start or 0) for asked in server.asked) < len(data)


@pytest.mark.parametrize("data", [b"<html>" * 100, b"GGUF" + b"\xff" * 400])
def test_a_header_that_is_none_is_a_sentence(
    server: HostileServer, tmp_path: Path, data: bytes
) -> None:
    server.files["/m"] = data
    source = Source(server.url)
    with pytest.raises(EngineError):
        fetch_header(source, [RemoteFile(f"{server.url}/m", "m.gguf", len(data))], tmp_path)
    source.close()


class Ring:
    """A keyring in memory."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], str] = {}

    def get_password(self, service: str, name: str) -> str | None:
        return self.kept.get((service, name))

    def set_password(self, service: str, name: str, word: str) -> None:
        self.kept[service, name] = word

    def delete_password(self, service: str, name: str) -> None:
        del self.kept[service, name]


def test_a_token_is_kept_by_the_keyring_for_one_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring()
    for name in ("get_password", "set_password", "delete_password"):
        monkeypatch.setattr(f"keyring.{name}", getattr(ring, name))
    assert TokenStore("https://hub", lambda: "").put(" hf_secret\n")
    assert ring.kept == {("Tandem", "https://hub"): "hf_secret"}
    store = TokenStore("https://hub", lambda: "hf_other")
    assert store.get() == "hf_secret"
    assert TokenStore("https://mirror", lambda: "hf_other").get() == "hf_other"
    assert store.put("")
    assert not ring.kept
    assert store.get() == "hf_other"


@pytest.mark.parametrize("how", ["no keyring", "locked", "broken"])
def test_without_a_keyring_a_token_lasts_for_the_session(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    from keyring.errors import KeyringLocked, NoKeyringError

    caplog.set_level(logging.DEBUG)
    error = {
        "no keyring": NoKeyringError("none"), "locked": KeyringLocked("locked"),
        "broken": OSError("D-Bus is gone"),
    }[how]  # fmt: skip

    def fail(*_: object) -> None:
        raise error

    for name in ("get_password", "set_password", "delete_password"):
        monkeypatch.setattr(f"keyring.{name}", fail)
    store = TokenStore("https://hub", lambda: "")
    assert store.get() == ""
    assert not store.put("hf_secret")
    assert store.get() == "hf_secret"
    assert "hf_secret" not in caplog.text


def test_gated_files_are_explained(server: HostileServer, tmp_path: Path) -> None:
    data = tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    add_repository(server, "acme/closed", {"t.gguf": data}, gated="auto", token="hf_yes")
    found = Hub(server.url, lambda: "").repository("acme/closed")
    assert found.is_gated
    for token, error in (("", Denied), ("hf_no", Denied), ("hf_yes", None)):
        source = Source(server.url, lambda token=token: token)
        try:
            if error is None:
                assert fetch_header(source, found.files, tmp_path / "..").name.endswith(".gguf")
            else:
                with pytest.raises(error, match="gated"):
                    fetch_header(source, found.files, tmp_path)
        finally:
            source.close()
