"""Files are replaced whole, and what a killed process left half written is swept away."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from engine.util.files import atomic_write, read_file, sweep_temporaries, temporary_folder
from tests.helpers.odd_files import make_odd_file, odd_files

WRITER = """
import sys, time
from pathlib import Path
from engine.util.files import atomic_write, temporary_folder
base = Path(sys.argv[1])
with temporary_folder(base) as folder, atomic_write(base / "a.json") as file:
    (folder / "state").write_bytes(b"many gigabytes")
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def writer(tmp_path: Path) -> "subprocess.Popen[str]":
    """Start a process that is in the middle of a file and a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def test_what_a_killed_process_left_is_swept_and_nothing_else(
    tmp_path: Path, writer: "subprocess.Popen[str]"
) -> None:
    others = [tmp_path / "a.json", tmp_path / ".tandem-notes.tmp", tmp_path / "plan.tmp"]
    for path in others:
        path.write_text("kept")
    try:
        sweep_temporaries(tmp_path)
        assert len(list(tmp_path.iterdir())) == len(others) + 2, "the writer lives"
    finally:
        end(writer)
    sweep_temporaries(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(others)
    assert (tmp_path / "a.json").read_text() == "kept"


def test_the_number_of_a_dead_process_may_be_anothers_by_now(
    tmp_path: Path, writer: "subprocess.Popen[str]"
) -> None:
    end(writer)
    left = [path for path in tmp_path.iterdir() if path.name.startswith(".tandem-")]
    assert len(left) == 2
    for path in left:  # this process, with another start
        _, made_by, _ = path.name[1:].split(".")
        path.rename(path.with_name(path.name.replace(made_by, f"{os.getpid()}-1-{made_by[-8:]}")))
    sweep_temporaries(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_temporaries_of_other_machines_stay(
    tmp_path: Path, writer: "subprocess.Popen[str]"
) -> None:
    """Their processes cannot be seen from here."""
    end(writer)
    for path in list(tmp_path.iterdir()):
        path.rename(path.with_name(path.name[: -len("01234567.tmp")] + "01234567.tmp"))
    sweep_temporaries(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_first_write_into_a_folder_sweeps_it(
    tmp_path: Path, writer: "subprocess.Popen[str]"
) -> None:
    end(writer)
    with atomic_write(tmp_path / "b.json") as file:
        file.write(b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["b.json"]


def test_own_temporaries_are_not_swept(tmp_path: Path) -> None:
    with temporary_folder(tmp_path) as folder, atomic_write(tmp_path / "a") as file:
        sweep_temporaries(tmp_path)
        (folder / "inside").write_text("kept")
        file.write(b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert not folder.exists()


@pytest.mark.skipif(os.name != "posix", reason="folders cannot be written by themselves")
@odd_files
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    make_odd_file(tmp_path / "odd", kind)
    with pytest.raises((OSError, ValueError)):
        read_file(tmp_path / "odd", 1 << 20)
    (tmp_path / "file").write_bytes(b"12345")
    assert read_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ValueError, match="larger than 4 bytes"):
        read_file(tmp_path / "file", 4)


def test_the_new_name_is_on_the_disk_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may otherwise leave the old file, or none where there was none."""
    synced: list[bool] = []
    fsync = os.fsync

    def note(handle: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(handle).st_mode))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    with atomic_write(tmp_path / "a.json") as file:
        file.write(b"{}")
    assert synced == [False, True]
    with atomic_write(tmp_path / "b.json", is_durable=False) as file:
        file.write(b"{}")
    assert synced == [False, True]
