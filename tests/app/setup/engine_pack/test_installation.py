"""An installation ends with an engine that has answered, or with a sentence and the old one."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from app.models.downloads.transfer import part_file, transfer
from app.models.downloads.transfer.transfer import Patience
from app.setup.engine_pack import fetching, installation
from app.setup.engine_pack.fetching import InstallProgress, InstallStage
from app.setup.engine_pack.installation import Installation, Installed
from app.setup.engine_pack.lock import locks_dir, read_lock, this_python, this_system
from app.setup.engine_pack.store import Pack, PackBusy, PackStore
from engine import Cancelled, EngineError
from tests.helpers.fake_pack import FakePack, adopt_pack, fake_attempt, make_pack
from tests.helpers.hostile_server import HostileServer, Mischief, hostile_server

ROOT = Path(__file__).parents[4]

QUICK = Patience(tries=2, base_s=0.01, most_s=0.02)


class Bench(NamedTuple):
    """A server of fake wheels, and a store to install them into."""

    server: HostileServer
    folder: Path
    store: PackStore

    def pack(self, version: str = "9.1.0", **options: int) -> FakePack:
        """Make a pack whose wheels the server has."""
        pack = make_pack(self.folder, self.server.url, version, **options)
        self.server.files.update(pack.files())
        return pack

    def install(
        self,
        pack: FakePack,
        wheels: Path | None = None,
        report: Callable[[InstallProgress], None] = lambda _: None,
        **options: object,
    ) -> Installed:
        """Install a pack, trying it by a fake torch."""
        return self.prepare(pack, wheels, report, **options).run()

    def prepare(
        self,
        pack: FakePack,
        wheels: Path | None = None,
        report: Callable[[InstallProgress], None] = lambda _: None,
        **options: object,
    ) -> Installation:
        options = {"patience": QUICK, "attempt": fake_attempt(), **options}
        return Installation(read_lock(pack.lock), self.store, wheels, report, **options)  # type: ignore[arg-type]

    def left(self) -> list[str]:
        """Return the names of what lies in the store."""
        names = (path.name for path in self.store.folder.iterdir())
        return sorted(name for name in names if name not in ("lock", "current.json"))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # as in a packaged Tandem
    monkeypatch.setattr(transfer, "POLL_S", 0.01)
    monkeypatch.setattr(installation, "flush_disks", lambda: None)
    with hostile_server() as server:
        yield Bench(server, tmp_path / "made", PackStore(tmp_path / "engines"))


@pytest.fixture
def old(bench: Bench) -> Pack:
    """A pack that is in use."""
    return adopt_pack(bench.store)


def assert_unchanged(bench: Bench, old: Pack) -> None:
    """Check that the old pack is in use, works, and nothing half-made is left."""
    assert bench.store.current == old
    assert fake_attempt()(old.folders).version == "9.0.0"
    assert [name for name in bench.left() if name != "fetched"] == [old.name]


def test_a_pack_is_fetched_unpacked_tried_and_used(bench: Bench) -> None:
    seen: list[InstallProgress] = []
    pack = bench.install(bench.pack(), report=seen.append).pack
    assert bench.store.current == pack
    assert (pack.backend, pack.version, pack.is_usable) == ("cpu", "9.1.0", True)
    assert (Path(pack.folders[0]) / "torch/lib/part2.bin").stat().st_size == 100_000
    assert pack.n_bytes > 300_000
    assert list(Path(pack.folders[0]).glob("torch/__pycache__/*.pyc")), "later starts are quicker"
    assert bench.left() == [pack.name], "wheels and caches are gone"
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages[-2:] == [InstallStage.UNPACKING, InstallStage.TRYING]
    assert {InstallStage.FETCHING, InstallStage.CHECKING} <= set(stages)
    counted = [p.n_done for p in seen if p.stage is InstallStage.FETCHING]
    assert counted == sorted(counted)
    assert counted[-1] <= seen[1].n_bytes
    assert seen[0] == InstallProgress(InstallStage.CHECKING), "of what is left of others"


def test_the_previous_pack_stays_and_can_come_back(bench: Bench, old: Pack) -> None:
    new = bench.install(bench.pack()).pack
    assert bench.store.previous == old
    assert bench.store.roll_back() == old
    assert (bench.store.current, bench.store.previous) == (old, new)
    third = bench.install(bench.pack("9.2.0")).pack
    assert bench.left() == sorted([old.name, third.name]), "two packs are kept"


@pytest.mark.parametrize(
    ("mischief", "words"),
    [
        (Mischief(cut_after=1000), "could not be downloaded: The connection was lost."),
        (Mischief(status=500), "could not be downloaded: 127.0.0.1 returned error"),
        (Mischief(status=404), "no longer has this file."),
        (Mischief(status=403), "requires a token for this file"),
    ],
)
def test_a_server_that_fails_is_told(
    bench: Bench, old: Pack, mischief: Mischief, words: str
) -> None:
    pack = bench.pack()
    bench.server.plan = lambda _: mischief
    with pytest.raises(EngineError, match=words) as caught:
        bench.install(pack)
    assert "torch-9.1.0" in str(caught.value) or ".whl" in str(caught.value)
    assert "model" not in caught.value.hint
    assert_unchanged(bench, old)


def test_without_a_network_it_says_so(bench: Bench, old: Pack) -> None:
    pack = bench.pack()
    text = pack.lock.read_text()
    pack.lock.write_text(text.replace(bench.server.url, "http://127.0.0.1:9"))
    with pytest.raises(EngineError, match="The server cannot be reached"):
        bench.install(pack)
    assert_unchanged(bench, old)


def test_a_cut_connection_goes_on_where_it_stopped(bench: Bench) -> None:
    pack = bench.pack(n_bytes=600_000)
    faults = iter([Mischief(cut_after=400_000), Mischief(cut_after=0), Mischief(cut_after=0)])
    bench.server.plan = lambda asked: next(faults) if "torch" in asked.path else None
    with pytest.raises(EngineError, match="was lost"):
        bench.install(pack)
    assert bench.prepare(pack).n_fetched > 400_000
    bench.server.plan = lambda _: None
    bench.server.asked.clear()
    assert bench.install(pack).pack.version == "9.1.0"
    assert [asked.start for asked in bench.server.asked] == [400_000]


def test_a_wheel_with_another_hash_is_refused(bench: Bench, old: Pack) -> None:
    pack = bench.pack()
    name = next(name for name in bench.server.files if name.startswith("/torch-9.1.0"))
    data = bytearray(bench.server.files[name])
    data[1000] ^= 1
    bench.server.files[name] = bytes(data)
    with pytest.raises(EngineError, match=r"torch-9\.1\.0.* checksum does not match"):
        bench.install(pack)
    assert not list(bench.store.fetched.glob("torch*")), "nothing of it is kept"
    assert_unchanged(bench, old)


def test_what_changed_on_the_disk_since_is_fetched_again(bench: Bench) -> None:
    pack = bench.pack()
    bench.store.fetched.mkdir(parents=True)
    (bench.store.fetched / "torch-9.1.0-py3-none-any.whl").write_bytes(b"PK and other things")
    (bench.store.fetched / "torch-8.0.0-py3-none-any.whl").write_bytes(b"PK of old")
    assert bench.install(pack).pack.version == "9.1.0"


def test_a_stop_is_a_pause_and_discard_a_cancellation(bench: Bench, old: Pack) -> None:
    pack = bench.pack(n_bytes=3_000_000)
    bench.server.plan = lambda _: Mischief(pause_s=0.002)

    def report(progress: InstallProgress) -> None:
        if progress.n_done > 500_000:
            running.stop()

    running = bench.prepare(pack, report=report)
    with pytest.raises(Cancelled):
        running.run()
    arrived = bench.prepare(pack).n_fetched
    assert arrived > 500_000
    assert_unchanged(bench, old)
    running.discard()
    assert bench.prepare(pack).n_fetched == 0
    assert bench.left() == [old.name]


@pytest.mark.parametrize("stage", [InstallStage.UNPACKING, InstallStage.TRYING])
def test_each_later_stage_can_be_stopped(bench: Bench, old: Pack, stage: InstallStage) -> None:
    def report(progress: InstallProgress) -> None:
        if progress.stage is stage:
            running.stop()

    running = bench.prepare(bench.pack(), report=report)
    with pytest.raises(Cancelled):
        running.run()
    assert_unchanged(bench, old)
    assert running.n_fetched == read_lock(bench.folder / "pylock.cpu-9-1-0.toml").n_bytes


def test_room_is_checked_first(bench: Bench, old: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = bench.pack()
    usage = shutil.disk_usage(bench.folder)
    monkeypatch.setattr(
        installation.shutil, "disk_usage", lambda _: usage._replace(free=part_file.SPARE + 400_000)
    )
    with pytest.raises(EngineError, match=r"has 0\.0 GB free, but the engine needs 0\.0 GB"):
        bench.install(pack)
    assert not bench.store.fetched.exists(), "nothing was fetched"
    assert_unchanged(bench, old)


def test_a_disk_that_fills_while_fetching_is_told(
    bench: Bench, old: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise part_file.NoRoom("The disk is full: torch is incomplete.")

    monkeypatch.setattr(part_file.PartFile, "write", full)
    with pytest.raises(part_file.NoRoom, match="disk is full"):
        bench.install(bench.pack())
    assert_unchanged(bench, old)


def fake_uv(folder: Path, script: str) -> Path:
    """Write a program in place of uv."""
    path = folder / "uv"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for uv")
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'error: No space left on device (os error 28)' >&2; exit 2", "filled up while"),
        ("echo 'error: no wheel fits' >&2; exit 1", "could not be unpacked: error: no wheel fits."),
        ("kill -9 $$", "could not be unpacked: status -9."),
        ("exit 0", "does not work"),  # and unpacks nothing
    ],
)
def test_a_failing_uv_is_told(
    bench: Bench, old: Pack, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    pack = bench.pack()
    uv = fake_uv(bench.folder, script)
    monkeypatch.setattr(fetching, "find_uv", lambda: uv)
    with pytest.raises(EngineError, match=words):
        bench.install(pack)
    assert_unchanged(bench, old)


def test_without_uv_nothing_is_fetched(
    bench: Bench, old: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = bench.pack()
    bench.server.asked.clear()
    monkeypatch.setattr(fetching, "PLACES", ())
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EngineError, match="uv, which unpacks the engine, is missing") as found:
        bench.install(pack)
    assert "pip" not in found.value.hint, "a window shows it, too"
    assert not bench.server.asked
    assert_unchanged(bench, old)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; sys.exit('torch needs a newer glibc.')", "torch needs a newer glibc"),
        ("import os; os.abort()", "does not work: status -"),
        ("print('{}')", "does not work: {}"),
    ],
)
def test_a_pack_that_does_not_answer_is_not_used(
    bench: Bench, old: Pack, program: str, words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        bench.install(bench.pack(), attempt=fake_attempt(program))
    assert_unchanged(bench, old)


def test_a_pack_without_a_token_is_not_used(bench: Bench, old: Pack) -> None:
    with pytest.raises(EngineError, match="The new engine does not work"):
        bench.install(bench.pack(n_tokens=0))
    assert_unchanged(bench, old)


def test_two_installers_do_not_meet(bench: Bench, old: Pack) -> None:
    with PackStore(bench.store.folder).locked(), pytest.raises(PackBusy):
        bench.install(bench.pack())
    with bench.store.locked():
        for change in (
            bench.store.roll_back,
            bench.store.remove,
            bench.prepare(bench.pack("9.3.0")).discard,
        ):
            with pytest.raises(PackBusy):
                change()
    assert_unchanged(bench, old)


def test_a_folder_of_wheels_needs_no_network(bench: Bench) -> None:
    pack = make_pack(bench.folder)  # without addresses
    with pytest.raises(EngineError, match="its wheels have no addresses"):
        bench.install(pack)
    assert bench.install(pack, pack.wheels).pack.version == "9.1.0"
    assert len(list(pack.wheels.iterdir())) == 3, "the folder is left as it was"


def test_a_folder_with_other_wheels_is_refused_by_name(bench: Bench, old: Pack) -> None:
    pack = make_pack(bench.folder)
    wheel = pack.wheels / "torch-9.1.0-py3-none-any.whl"
    moved = wheel.rename(wheel.with_name("torch-9.0.9-py3-none-any.whl"))
    with pytest.raises(EngineError, match=r"has torch-9\.0\.9.*, but torch-9\.1\.0.* is needed"):
        bench.install(pack, pack.wheels)
    data = moved.read_bytes()
    moved.unlink()
    with pytest.raises(EngineError, match=r"lacks 1 wheel: torch-9\.1\.0"):
        bench.install(pack, pack.wheels)
    wheel.write_bytes(data[:-1] + b"x")
    with pytest.raises(EngineError, match="corrupted or from another build"):
        bench.install(pack, pack.wheels)
    assert_unchanged(bench, old)


def test_a_lock_of_another_system_is_refused(bench: Bench) -> None:
    pack = make_pack(bench.folder)
    pack.lock.write_text(pack.lock.read_text().replace('python = "3.', 'python = "2.'))
    with pytest.raises(EngineError, match=r"This engine is for .* and Python 2\."):
        bench.install(pack, pack.wheels)


def test_an_old_macos_is_told_before_anything_is_fetched(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = read_lock(locks_dir() / "pylock.cpu-macos-aarch64.toml")
    assert lock.least_macos == 14
    here = replace(lock, system=this_system(), python=this_python())
    monkeypatch.setattr(installation.platform, "mac_ver", lambda: ("13.6.1", ("", "", ""), "arm64"))
    with pytest.raises(EngineError, match="needs macOS 14 or newer"):
        Installation(here, bench.store).run()
    assert not bench.store.folder.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="it kills by a signal")
def test_a_killed_installer_leaves_the_old_engine_and_can_go_on(bench: Bench, old: Pack) -> None:
    pack = bench.pack(n_bytes=2_000_000)
    bench.server.plan = lambda asked: Mischief(pause_s=0.01) if "torch" in asked.path else None
    command = [sys.executable, "-m", "tests.helpers.installing"]
    command += [str(pack.lock), str(bench.store.folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["CHECKING\n", "FETCHING\n"]
        time.sleep(0.2)
        process.kill()
    assert bench.store.current == old
    bench.server.plan = lambda _: None
    assert bench.install(pack).pack.version == "9.1.0"
    assert bench.store.previous == old
