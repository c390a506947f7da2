"""Downloads in the running window, against a hub on this machine: search, verdict, fetch, open."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFileDialog, QLineEdit, QWidget
from pytestqt.qtbot import QtBot

from app.core import paths
from app.main import Shell
from app.models.downloads.download_session import DownloadSession
from app.models.downloads.download_view import DownloadView, TokenDialog, TransferRow
from app.models.downloads.transfer import transfer
from app.models.downloads.transfer.transfer import Patience
from app.models.library.page import LibraryPage
from engine import Load
from engine.model.architectures.info import read_model_info
from tests.helpers.fake_hub import add_repository, start_hub
from tests.helpers.hostile_server import HostileServer, Mischief, hostile_server
from tests.helpers.shell_driver import MakeShell, banner, host_of
from tests.helpers.tiny_gguf import tiny_gguf

REPO = "acme/tiny-chat-GGUF"
Q4, Q8 = "tiny-chat-Q4_0.gguf", "tiny-chat-Q8_0.gguf"
EYES = "mmproj-F16.gguf"
LONG = b"GGUF" + random.Random(3).randbytes(2_000_000)


@pytest.fixture
def models(tmp_path: Path) -> dict[str, bytes]:
    """Return the files of a repository, of which two can be run."""
    return {
        Q4: tiny_gguf(tmp_path / "q4.gguf", n_layer=2, n_head_kv=2).read_bytes(),
        Q8: tiny_gguf(tmp_path / "q8.gguf", n_layer=4, n_head_kv=2).read_bytes(),
        EYES: b"GGUF with eyes",
    }


@pytest.fixture
def hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, models: dict[str, bytes]
) -> Iterator[HostileServer]:
    """A hub with one open repository and a gated one; the home has no models and no token."""
    monkeypatch.setattr("app.models.library.scan.Path.home", lambda: tmp_path / "nobody")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))
    monkeypatch.setattr("app.models.downloads.hub.client.machine_token", lambda: "")
    monkeypatch.setattr(transfer, "PIECE_BYTES", 64 << 10)
    monkeypatch.setattr(transfer, "POLL_S", 0.01)
    monkeypatch.setattr(transfer, "Patience", lambda: Patience(9, 0.01, 0.05))
    with hostile_server() as server:
        start_hub(server)
        add_repository(server, REPO, models)
        add_repository(server, "acme/long-GGUF", {"long-Q8_0.gguf": LONG})
        add_repository(server, "acme/closed", {Q4: models[Q4]}, gated="manual", token="hf_yes")
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def shell(
    qtbot: QtBot, make_shell: MakeShell, hub: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> Shell:
    made = make_shell()
    monkeypatch.setattr("engine.read_model_info", read_model_info)  # the files here are real
    qtbot.waitUntil(lambda: made.start_up.is_ready)
    return made


def view_of(shell: Shell) -> DownloadView:
    assert shell.downloads.view is not None
    return shell.downloads.view


def session_of(shell: Shell) -> DownloadSession:
    assert shell.downloads.session is not None
    return shell.downloads.session


def show(qtbot: QtBot, shell: Shell) -> DownloadView:
    """Open the page with the downloads in front."""
    shell.library.show_part(shell.downloads)
    part = shell.downloads
    qtbot.waitUntil(lambda: part.view is not None and part.view.isVisible(), timeout=20_000)
    view = view_of(shell)
    assert view.search.hasFocus()
    return view


def column(view: QWidget, number: int) -> list[str]:
    model = view.table.model()  # type: ignore[attr-defined]
    return [str(model.index(row, number).data()) for row in range(model.rowCount())]


def open_repository(qtbot: QtBot, shell: Shell, text: str) -> DownloadView:
    """Paste the name of a repository and wait for its offers."""
    view = show(qtbot, shell)
    view.search.setText(text)
    qtbot.keyClick(view.search, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: view.has_offers, timeout=20_000)
    return view


def only_row(view: DownloadView) -> TransferRow:
    (row,) = view.transfers.rows.values()
    return row


def states(shell: Shell) -> list[str]:
    return [job.state for job in session_of(shell).jobs]


def test_a_model_is_found_judged_downloaded_and_opened_by_keys_alone(
    qtbot: QtBot, shell: Shell, hub: HostileServer, models: dict[str, bytes], home: Path
) -> None:
    view = show(qtbot, shell)
    assert not hub.asked  # nothing is asked of the network without a click
    qtbot.keyClicks(view.search, "tiny chat")
    view.search.setText("tiny-chat")
    qtbot.keyClick(view.search, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: view.results.table.hasFocus(), timeout=20_000)
    assert column(view.results, 0) == ["tiny-chat-GGUF"]
    assert column(view.results, 1) == ["acme"]
    assert column(view.results, 2) == ["135 M"]
    qtbot.keyClick(view.results.table, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: view.has_offers, timeout=20_000)
    assert view.offers.table.hasFocus()
    assert column(view.offers, 0) == [f"Q4_0 · with {EYES}", f"Q8_0 · with {EYES}"]
    assert column(view.offers, 1) == ["probably fits", "probably fits"]
    n_asked = len(hub.asked)
    qtbot.keyClick(view.offers.table, Qt.Key.Key_Down)
    view.offers.check.setFocus()
    qtbot.keyClick(view.offers.check, Qt.Key.Key_Space)
    qtbot.waitUntil(lambda: column(view.offers, 1)[1] not in ("probably fits", "…"), timeout=20_000)
    verdict = column(view.offers, 1)[1]
    assert "tok/s" in verdict or "fits" in verdict
    assert len(hub.asked) == n_asked + 1
    view.offers.table.setFocus()
    qtbot.keyClick(view.offers.table, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: states(shell) == ["done"], timeout=20_000)
    folder = paths.models_dir() / "acme" / "tiny-chat-GGUF"
    assert (folder / Q8).read_bytes() == models[Q8]
    assert sorted(path.name for path in folder.iterdir()) == sorted([Q8, EYES])
    assert "has been downloaded" in banner(shell)
    notice = shell.window.banner.notice
    assert notice is not None
    assert notice.is_news  # so that the desktop may tell it
    only_row(view).open.setFocus()
    qtbot.keyClick(only_row(view).open, Qt.Key.Key_Space)
    qtbot.waitUntil(lambda: shell.client.model is not None)
    loads = [command for command in host_of(shell).commands if isinstance(command, Load)]
    assert loads[-1].params.path == str(folder / Q8)


def test_a_download_with_three_interruptions_and_a_restart_has_the_right_bytes(
    qtbot: QtBot, shell: Shell, make_shell: MakeShell, hub: HostileServer, home: Path
) -> None:
    """A cut connection, a pause, a fault of the server that lasts, and an end of the program."""
    cuts = iter(range(10_000))
    hub.plan = lambda _: Mischief(pause_s=0.01, cut_after=50_000 if next(cuts) == 5 else None)
    view = open_repository(qtbot, shell, "acme/long-GGUF")
    view.offers.download.click()
    row = only_row(view)

    def arrived(share: float) -> None:
        job = session_of(shell).jobs[0]
        qtbot.waitUntil(
            lambda: session_of(shell).progress(job.id).n_bytes > share * len(LONG), timeout=20_000
        )

    arrived(0.2)
    row.pause.click()
    qtbot.waitUntil(lambda: states(shell) == ["paused"], timeout=20_000)
    assert "paused" in row.text
    assert not row.resume.isHidden()
    hub.plan = lambda _: Mischief(status=503)
    row.resume.click()
    qtbot.waitUntil(lambda: states(shell) == ["failed"], timeout=20_000)
    assert "error 503" in row.text
    assert "error 503" in banner(shell)
    hub.plan = lambda _: Mischief(pause_s=0.01)
    row.resume.click()
    arrived(0.6)
    shell.window.close()
    n_before = len(hub.asked)
    again = make_shell()
    view = show(qtbot, again)
    assert states(again) == ["paused"]
    assert " of 2.0 MB · paused" in only_row(view).text
    assert not only_row(view).text.startswith("0 B")
    assert len(hub.asked) == n_before  # it waits for a click
    hub.plan = lambda _: None
    only_row(view).resume.click()
    qtbot.waitUntil(lambda: states(again) == ["done"], timeout=20_000)
    path = paths.models_dir() / "acme/long-GGUF/long-Q8_0.gguf"
    assert path.read_bytes() == LONG
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert not list(paths.downloads_dir().glob("*.json"))


def test_a_cancelled_download_leaves_nothing(
    qtbot: QtBot, shell: Shell, hub: HostileServer, home: Path
) -> None:
    hub.plan = lambda _: Mischief(pause_s=0.02)
    view = open_repository(qtbot, shell, "acme/long-GGUF")
    for is_paused in (False, True):
        view.offers.download.click()
        qtbot.waitUntil(lambda: states(shell) == ["running"])
        if is_paused:
            only_row(view).pause.click()
            qtbot.waitUntil(lambda: states(shell) == ["paused"], timeout=20_000)
        only_row(view).cancel.click()
        qtbot.waitUntil(lambda: not session_of(shell).jobs, timeout=20_000)
        assert not view.transfers.isVisible()
        assert paths.models_dir().is_dir()
        assert not list(paths.models_dir().rglob("*"))
        assert not list(paths.downloads_dir().glob("*"))


def test_two_downloads_run_and_others_wait(
    qtbot: QtBot, shell: Shell, hub: HostileServer, models: dict[str, bytes]
) -> None:
    for number in range(3):
        add_repository(hub, f"acme/m{number}", {f"m{number}-Q8_0.gguf": LONG})
    hub.plan = lambda asked: Mischief(pause_s=0.02) if "resolve" in asked.path else None
    for number in range(3):
        view = open_repository(qtbot, shell, f"acme/m{number}")
        view.offers.download.click()
        view.show_results()
    assert states(shell) == ["running", "running", "waiting"]
    assert "queued" in view.transfers.rows[session_of(shell).jobs[2].id].text
    session_of(shell).cancel(session_of(shell).jobs[0].id)
    qtbot.waitUntil(lambda: states(shell) == ["running", "running"], timeout=20_000)


def test_a_gated_model_is_explained_and_a_token_opens_it(
    qtbot: QtBot,
    shell: Shell,
    hub: HostileServer,
    monkeypatch: pytest.MonkeyPatch,
    home: Path,
    ring: dict[str, str],
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("app.models.downloads.download_presenter._browse", opened.append)
    view = open_repository(qtbot, shell, "acme/closed")
    assert view.offers._gated.isVisible()
    view.offers.download.click()
    qtbot.waitUntil(lambda: states(shell) == ["failed"], timeout=20_000)
    assert "is gated" in banner(shell)
    notice = shell.window.banner.notice
    assert notice is not None
    assert notice.action == "Open its page"
    shell.window.banner._act()
    assert opened == [f"{hub.url}/acme/closed"]
    view.token_requested.emit()
    (dialog,) = view.findChildren(TokenDialog)
    assert dialog.field.echoMode() is QLineEdit.EchoMode.Password
    dialog.field.setText("hf_yes")
    qtbot.keyClick(dialog.field, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: ring == {hub.url: "hf_yes"})
    qtbot.waitUntil(lambda: "keyring was updated" in banner(shell))
    only_row(view).resume.click()
    qtbot.waitUntil(lambda: states(shell) == ["done"], timeout=20_000)
    shell.settings.save()
    for path in home.rglob("*"):
        assert path.is_dir() or b"hf_yes" not in path.read_bytes(), path


def test_it_opens_when_done_if_the_person_wants_that(
    qtbot: QtBot, shell: Shell, hub: HostileServer
) -> None:
    from dataclasses import replace

    shell.keep(replace(shell.settings.current, opens_downloads=True))
    view = open_repository(qtbot, shell, f"{REPO}:Q8_0")
    assert view.offers.table.currentIndex().row() == 1
    view.offers.download.click()
    qtbot.waitUntil(lambda: shell.client.model is not None, timeout=20_000)


def test_what_the_hub_cannot_do_is_a_sentence(
    qtbot: QtBot, shell: Shell, hub: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = show(qtbot, shell)
    for text, words in (
        ("acme/nothing", "There is no repository acme/nothing"),
        (f"{REPO}:Q2_K", "has no Q2_K"),
        ("https://example.org/setup.exe", "does not point to a model"),
        (f"{hub.url}/m.gguf".replace("127.0.0.1", "localhost"), "no longer has this file"),
    ):
        view.search.setText(text)
        view.go.click()
        qtbot.waitUntil(lambda words=words: words in banner(shell), timeout=20_000)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    view.search.setText("tiny")
    view.go.click()
    qtbot.waitUntil(lambda: "HF_HUB_OFFLINE is set" in banner(shell), timeout=20_000)


def test_a_plain_link_to_a_file_is_enough(
    qtbot: QtBot, shell: Shell, models: dict[str, bytes], home: Path
) -> None:
    with hostile_server() as other:
        other.files["/dir/odd%20name.gguf"] = models[Q4]
        link = f"{other.url}/dir/odd%20name.gguf?x=1".replace("127.0.0.1", "localhost")
        view = open_repository(qtbot, shell, link)
        view.offers.download.click()
        qtbot.waitUntil(lambda: states(shell) == ["done"], timeout=20_000)
        assert {asked.token for asked in other.asked} == {""}
    path = paths.models_dir() / "localhost/odd name/odd name.gguf"
    assert path.read_bytes() == models[Q4]
    notice = shell.window.banner.notice
    assert notice is not None
    assert "no checksum" in notice.hint


def test_a_folder_can_be_chosen_and_the_models_page_looks_there(
    qtbot: QtBot, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tmp_path / "big disk"
    chosen.mkdir()
    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *_: str(chosen))
    view = open_repository(qtbot, shell, REPO)
    view.folder_requested.emit()
    assert shell.settings.current.download_folder == str(chosen)
    view.offers.download.click()
    qtbot.waitUntil(lambda: states(shell) == ["done"], timeout=20_000)
    library = shell.library
    assert isinstance(library, LibraryPage)
    assert library.view is not None

    def listed() -> bool:
        model = library.view.table.model()  # type: ignore[union-attr]
        return [model.index(row, 0).data() for row in range(model.rowCount())] == [
            f"{Q4[:-5]} · vision"
        ]

    qtbot.waitUntil(listed, timeout=20_000)


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"files": 3}', "[" * 100_000])
def test_a_damaged_record_is_left_out(qtbot: QtBot, shell: Shell, home: Path, damage: str) -> None:
    folder = paths.downloads_dir()
    folder.mkdir(parents=True)
    (folder / f"{'0' * 32}.json").write_text(damage)
    show(qtbot, shell)
    assert not session_of(shell).jobs


def test_words_of_the_hub_are_shown_as_they_are(
    qtbot: QtBot, shell: Shell, hub: HostileServer
) -> None:
    """A licence is free text; a name of a file that leads elsewhere is refused."""
    evil = {"..\\..\\evil-Q8_0.gguf": LONG}
    add_repository(hub, "acme/evil", evil, licence="<img src='file:///etc/hostname'>")
    view = open_repository(qtbot, shell, "acme/evil")
    assert view.offers._facts.textFormat() is Qt.TextFormat.PlainText
    assert "<img" in view.offers._facts._full
    view.offers.download.click()
    qtbot.waitUntil(lambda: "is not a valid file name" in banner(shell))
    assert not session_of(shell).jobs
