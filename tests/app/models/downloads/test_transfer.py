"""The downloader against a server that does everything wrong: the right bytes, or a sentence."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from app.models.downloads.transfer import part_file, transfer
from app.models.downloads.transfer.part_file import PartFile, gaps, merged, read_sidecar
from app.models.downloads.transfer.source import RemoteFile, Source
from app.models.downloads.transfer.transfer import FileTransfer, Patience
from engine import Cancelled, EngineError
from tests.helpers.hostile_server import Asked, HostileServer, Mischief, hostile_server

SIZE = 3_000_017
DATA = b"GGUF" + random.Random(1).randbytes(SIZE - 4)
NAME = "/acme/tiny/resolve/abc/tiny-q4_0.gguf"
QUICK = Patience(tries=9, base_s=0.01, most_s=0.05)


class Run(NamedTuple):
    """What a transfer needs, so that tests can change parts of it."""

    server: HostileServer
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "acme/tiny/tiny-q4_0.gguf"

    def file(self, data: bytes = DATA, **changes: object) -> RemoteFile:
        values = {
            "url": self.server.url + NAME, "name": "tiny-q4_0.gguf", "n_bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(), "repo": "acme/tiny", "commit": "abc",
        }  # fmt: skip
        return RemoteFile(**(values | changes))  # type: ignore[arg-type]

    def fetch(
        self,
        file: RemoteFile | None = None,
        stopped: threading.Event | None = None,
        report: Callable[[int, bool], None] = lambda _, __: None,
        token: str = "",
        patience: Patience = QUICK,
    ) -> None:
        source = Source(self.server.url, lambda: token, stall_s=0.5)
        part = PartFile(self.path, file or self.file())
        try:
            FileTransfer(part, source, stopped or threading.Event(), report, patience).run()
        finally:
            source.close()

    def left(self) -> list[str]:
        """Return the names of all files in the folder."""
        return sorted(path.name for path in self.folder.rglob("*") if path.is_file())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A server with one file of 3 MB, which is fetched in pieces of 256 KiB."""
    monkeypatch.setattr(transfer, "PIECE_BYTES", 256 << 10)
    monkeypatch.setattr(transfer, "POLL_S", 0.01)
    with hostile_server() as server:
        server.files[NAME] = DATA
        yield Run(server, tmp_path / "models")


def sometimes(n: int, mischief: Mischief) -> Callable[[Asked], Mischief | None]:
    """Return a plan by which every request but each n-th fails."""
    count = iter(range(10_000))
    return lambda _: None if next(count) % n == n - 1 else mischief


def test_a_file_arrives_in_pieces_side_by_side(run: Run) -> None:
    run.server.plan = lambda _: Mischief(pause_s=0.002)
    seen: list[tuple[int, bool]] = []
    run.fetch(report=lambda n, is_checking: seen.append((n, is_checking)))
    assert run.path.read_bytes() == DATA
    assert run.left() == ["tiny-q4_0.gguf"]
    assert run.server.most_at_once in (2, 3, 4)
    starts = [asked.start for asked in run.server.asked]
    assert len(starts) == len(set(starts)) == 12
    assert seen[-1] == (SIZE, True)
    assert [n for n, is_checking in seen if not is_checking] == sorted(
        n for n, is_checking in seen if not is_checking
    )


@pytest.mark.parametrize(
    "mischief",
    [
        Mischief(cut_after=70_000),
        Mischief(cut_after=0),
        Mischief(stall_after=40_000),
        Mischief(status=500),
        Mischief(status=503, headers={"Retry-After": "0"}),
        Mischief(status=429, headers={"Retry-After": "0"}),
        Mischief(content_range=f"bytes 7-{SIZE - 1}/{SIZE}"),
        Mischief(content_range="rubbish"),
        Mischief(content_range=f"bytes 0-{SIZE - 1}/{'9' * 5000}"),
        Mischief(headers={"Content-Encoding": "gzip"}),
        Mischief(body=b"", length=0),
        Mischief(ignores_range=True, cut_after=1_000_000),
        Mischief(ignores_range=True),
    ],
    ids=lambda m: ",".join(f"{k}={v}" for k, v in vars(m).items() if v not in (None, 0, {}, "")),
)
def test_what_passes_by_itself_is_tried_again(run: Run, mischief: Mischief) -> None:
    run.server.plan = sometimes(2, mischief)
    run.fetch()
    assert run.path.read_bytes() == DATA
    assert run.left() == ["tiny-q4_0.gguf"]


def test_a_server_that_knows_no_ranges_gives_one_stream(run: Run) -> None:
    run.server.plan = lambda _: Mischief(ignores_range=True, pause_s=0.002)
    run.fetch()
    assert run.path.read_bytes() == DATA
    assert len(run.server.asked) <= 4  # those that were sent before it was known
    assert run.left() == ["tiny-q4_0.gguf"]


@pytest.mark.parametrize(
    ("mischief", "words"),
    [
        (Mischief(cut_after=10), "The connection was lost."),
        (Mischief(stall_after=0), "The server does not respond."),
        (Mischief(status=500), "returned error 500."),
        (Mischief(status=429), "is limiting requests."),
        (Mischief(ignores_range=True, cut_after=100), "The connection was lost."),
    ],
)
def test_what_does_not_pass_is_a_sentence_and_can_be_resumed(
    run: Run, mischief: Mischief, words: str
) -> None:
    run.server.plan = lambda _: mischief
    with pytest.raises(EngineError) as caught:
        run.fetch(patience=Patience(tries=2, base_s=0.01))
    assert words in str(caught.value)
    assert "kept" in caught.value.hint
    run.server.plan = lambda _: None
    run.fetch()
    assert run.path.read_bytes() == DATA


@pytest.mark.parametrize(
    ("mischief", "words"),
    [
        (Mischief(status=404), "no longer has this file"),
        (Mischief(status=401), "requires a token"),
        (Mischief(status=403, headers={"X-Error-Code": "GatedRepo"}), "is gated"),
        (Mischief(status=418), "error 418"),
    ],
)
def test_what_cannot_be_fetched_is_said_at_once(run: Run, mischief: Mischief, words: str) -> None:
    run.server.plan = lambda _: mischief
    with pytest.raises(EngineError) as caught:
        run.fetch()
    assert words in str(caught.value)
    assert len(run.server.asked) <= 4
    assert not run.path.exists()


def test_a_server_that_cannot_be_reached_is_a_sentence(run: Run) -> None:
    run.server.close()
    with pytest.raises(EngineError, match="cannot be reached"):
        run.fetch(patience=Patience(tries=2, base_s=0.01))


@pytest.mark.parametrize("how", ["longer", "shorter", "other bytes", "wrong length", "page"])
def test_nothing_of_a_file_that_was_changed_is_kept(run: Run, how: str) -> None:
    other = random.Random(2).randbytes(SIZE)
    run.server.files[NAME] = {
        "longer": DATA + b"x", "shorter": DATA[:-1], "other bytes": b"GGUF" + other[4:],
        "wrong length": DATA, "page": b"<html>" + other[6:],
    }[how]  # fmt: skip
    if how == "wrong length":
        run.server.plan = lambda _: Mischief(ignores_range=True, length=SIZE + 5)
    with pytest.raises(EngineError) as caught:
        run.fetch()
    assert "deleted" in caught.value.hint or "shorter" in str(caught.value)
    assert run.left() == []


def test_a_file_that_changes_in_the_middle_is_not_mixed(run: Run) -> None:
    """The first half has arrived when the file becomes another one of the same size."""
    stopped = threading.Event()
    run.server.plan = lambda _: Mischief(pause_s=0.01)
    with pytest.raises(Cancelled):
        run.fetch(stopped=stopped, report=lambda n, _: stopped.set() if n > SIZE // 2 else None)
    other = b"GGUF" + random.Random(2).randbytes(SIZE - 4)
    run.server.files[NAME] = other
    with pytest.raises(EngineError, match="is corrupted"):
        run.fetch()
    assert run.left() == []
    run.fetch(run.file(other, commit="def"))
    assert run.path.read_bytes() == other


def test_three_interruptions_and_a_restart_end_with_the_right_bytes(run: Run) -> None:
    """Each interruption leaves a sidecar that tells the truth, and nothing is fetched twice."""
    run.server.plan = lambda _: Mischief(pause_s=0.01)
    for share in (0.2, 0.5, 0.8):
        stopped = threading.Event()

        def report(
            n: int, _: bool, stopped: threading.Event = stopped, share: float = share
        ) -> None:
            if n > share * SIZE:
                stopped.set()

        with pytest.raises(Cancelled):
            run.fetch(stopped=stopped, report=report)
        assert run.left() == ["tiny-q4_0.gguf.part", "tiny-q4_0.gguf.part.json"]
        known = read_sidecar(run.path.with_name("tiny-q4_0.gguf.part.json"))
        assert known is not None
        arrived = run.path.with_name("tiny-q4_0.gguf.part").read_bytes()
        assert known[1]
        assert all(arrived[start:end] == DATA[start:end] for start, end in known[1])
    run.server.plan = lambda _: None  # the restart: nothing is left but what is on the disk
    run.server.asked.clear()
    run.fetch()
    assert run.path.read_bytes() == DATA
    assert len(run.server.asked) < 6
    assert run.left() == ["tiny-q4_0.gguf"]


@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"finished": 3}', '{"finished": [[0, 1]]}', "[" * 100_000]
)
def test_a_damaged_sidecar_means_to_begin_anew(run: Run, damage: str) -> None:
    run.path.parent.mkdir(parents=True)
    run.path.with_name(f"{run.path.name}.part").write_bytes(b"x" * 100)
    run.path.with_name(f"{run.path.name}.part.json").write_text(damage)
    run.fetch()
    assert run.path.read_bytes() == DATA


def test_claims_of_a_sidecar_are_limited_to_what_is_there(run: Run) -> None:
    run.path.parent.mkdir(parents=True)
    run.path.with_name(f"{run.path.name}.part").write_bytes(DATA[:1000])
    claim = vars_of(run.file()) | {"finished": [[-5, 2000], [SIZE - 1, SIZE + 9]]}
    run.path.with_name(f"{run.path.name}.part.json").write_text(json.dumps(claim))
    run.fetch()
    assert run.path.read_bytes() == DATA
    assert min(asked.start or 0 for asked in run.server.asked) == 1000


def vars_of(file: RemoteFile) -> dict[str, object]:
    return {name: getattr(file, name) for name in RemoteFile.__slots__}


def test_a_token_goes_to_the_hub_and_nowhere_else(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """The address of the redirect is signed and expires twice; the log names neither."""
    caplog.set_level(logging.DEBUG)
    with hostile_server() as cdn:
        cdn.files["/blob"] = DATA
        signatures = iter(range(100))
        valid = [0]

        def redirect(_: Asked) -> Mischief:
            valid[0] = next(signatures)
            return Mischief(location=f"{cdn.url}/blob?signature=s3cret{valid[0]}")

        run.server.plan = redirect
        n_asked = iter(range(1000))

        def check(asked: Asked) -> Mischief | None:
            if next(n_asked) in (5, 9):
                return Mischief(status=403)
            return None

        cdn.plan = check
        run.fetch(token="hf_secret")
        assert run.path.read_bytes() == DATA
        assert {asked.token for asked in run.server.asked} == {"Bearer hf_secret"}
        assert {asked.token for asked in cdn.asked} == {""}
        assert 2 <= len(run.server.asked) < 12  # the address is remembered, and found anew
    assert "hf_secret" not in caplog.text
    assert "s3cret" not in caplog.text


def test_redirects_without_end_and_to_other_protocols_are_refused(run: Run) -> None:
    run.server.plan = lambda _: Mischief(location=run.server.url + NAME)
    with pytest.raises(EngineError, match="too many times"):
        run.fetch()
    for place in ("file:///etc/passwd", "ftp://host/x", "http://me:word@host/x"):
        run.server.plan = lambda _, place=place: Mischief(location=place)
        with pytest.raises(EngineError, match="cannot be used"):
            run.fetch()


def test_a_token_does_not_travel_in_the_open() -> None:
    for endpoint, is_sent in (
        ("https://hub.example", True),
        ("http://hub.example", False),
        ("http://127.0.0.1:8000", True),
    ):
        source = Source(endpoint, lambda: "hf_secret")
        at = source._endpoint.join("/acme/tiny")
        assert source._is_of_hub(at) is is_sent
        assert not source._is_of_hub(at.copy_with(host="evil.example"))
        assert not source._is_of_hub(at.copy_with(port=81))
        source.close()


def test_a_full_disk_is_said_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = part_file.shutil.disk_usage(run.folder.parent)
    monkeypatch.setattr(
        part_file.shutil, "disk_usage", lambda _: usage._replace(free=part_file.SPARE + 10)
    )
    with pytest.raises(EngineError, match=r"tiny.* needs"):
        run.fetch()
    assert not run.server.asked


def test_a_disk_that_fills_up_keeps_what_has_arrived(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = PartFile.write
    n_left = [1_000_000]

    class FullDisk:
        """A file on a disk with a million bytes."""

        def __init__(self, file: object) -> None:
            self._file = file

        def __getattr__(self, name: str) -> object:
            return getattr(self._file, name)

        def write(self, data: bytes) -> int:
            n_left[0] -= len(data)
            if n_left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return int(self._file.write(data))  # type: ignore[attr-defined]

    def full(part: PartFile, data: bytes, start: int) -> None:
        if not isinstance(part._output, FullDisk):
            part._output = FullDisk(part._output)  # type: ignore[assignment]
        write(part, data, start)

    monkeypatch.setattr(PartFile, "write", full)
    with pytest.raises(EngineError, match="The disk is full") as caught:
        run.fetch()
    assert "resume" in caught.value.hint
    n_before = sum(1 for _ in run.server.asked)
    monkeypatch.setattr(PartFile, "write", write)
    run.fetch()
    assert run.path.read_bytes() == DATA
    assert len(run.server.asked) - n_before < 12


def test_another_file_is_never_replaced(run: Run) -> None:
    run.path.parent.mkdir(parents=True)
    run.path.write_text("mine")
    with pytest.raises(EngineError, match="already exists"):
        run.fetch()
    assert run.path.read_text() == "mine"
    run.path.unlink()
    run.server.plan = lambda _: run.path.write_text("mine") and None
    with pytest.raises(EngineError, match="already exists"):
        run.fetch()
    assert run.path.read_text() == "mine"


def test_a_pause_does_not_wait_for_a_connection_that_hangs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "LEAVE_S", 0.1)
    run.server.plan = lambda _: Mischief(stall_after=0)
    stopped = threading.Event()
    threading.Timer(0.1, stopped.set).start()
    source = Source(run.server.url, stall_s=20)
    with pytest.raises(Cancelled):
        FileTransfer(PartFile(run.path, run.file()), source, stopped, patience=QUICK).run()
    left = [thread for thread in threading.enumerate() if thread.name == "tandem-piece"]
    assert left, "the connection still hangs"
    source.close()
    run.server.ended.set()
    for thread in left:
        thread.join(30)
        assert not thread.is_alive()


def test_a_server_that_allows_one_connection_is_enough(run: Run) -> None:
    def plan(_: Asked) -> Mischief:
        return Mischief(status=429) if run.server.at_once > 1 else Mischief(pause_s=0.001)

    run.server.plan = plan
    run.fetch()
    assert run.path.read_bytes() == DATA


def test_memory_stays_flat(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 96 MB takes no more memory than its chunks."""
    monkeypatch.setattr(transfer, "PIECE_BYTES", 32 << 20)
    data = b"GGUF" + bytes(96 << 20)
    run.server.files[NAME] = data
    file = run.file(data)
    tracemalloc.start()
    try:
        run.fetch(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20


def test_ranges() -> None:
    assert merged([(5, 7), (0, 2), (2, 3), (6, 9), (4, 4)]) == ((0, 3), (5, 9))
    assert gaps(((0, 3), (5, 9)), 0, 12) == ((3, 5), (9, 12))
    assert gaps(((0, 3), (5, 9)), 2, 6) == ((3, 5),)
    assert gaps((), 0, 0) == ()
