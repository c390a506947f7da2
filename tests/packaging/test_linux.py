"""What a Linux desktop gets of Tandem: names that fit each other, and the archive's installer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINUX = ROOT / "packaging" / "linux"
APP_ID = "org.tandem_llm.Tandem"
ENTRY = f".local/share/applications/{APP_ID}.desktop"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a script for Linux")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An unpacked archive whose program is a script that tells a version."""
    folder = tmp_path / "Down loads" / "tandem"
    usr = folder / "Tandem.AppDir" / "usr"
    home = usr / "lib" / "tandem"
    for name in ("bin/tandem", "python/bin/python3"):
        program = home / name
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\necho tandem 1.2.3\n")
        program.chmod(0o755)
    entry = usr / "share" / "applications" / f"{APP_ID}.desktop"
    entry.parent.mkdir(parents=True)
    shutil.copyfile(LINUX / entry.name, entry)
    script = (LINUX / "install.sh").read_text()
    (folder / "install.sh").write_text(script.replace("@GLIBC@", "2.2"))
    return folder


def install(archive: Path, home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    home.mkdir(exist_ok=True)
    return subprocess.run(
        ["sh", str(archive / "install.sh"), *options],
        cwd=home, env={"PATH": os.environ["PATH"], "HOME": str(home)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_archive_is_installed_and_removed_and_data_stay(archive: Path, tmp_path: Path) -> None:
    home = tmp_path / "my home"
    chats = home / ".local/share/Tandem/chats"
    chats.mkdir(parents=True)
    for _ in range(2):  # the second time over the first
        done = install(archive, home)
        assert (done.returncode, done.stderr) == (0, "")
        assert "tandem 1.2.3 is installed" in done.stdout
    program = home / ".local/bin/tandem"
    assert subprocess.check_output([program], text=True) == "tandem 1.2.3\n"
    lines = (home / ENTRY).read_text().splitlines()
    assert f'Exec="{program}" %f' in lines
    assert f"TryExec={program}" in lines
    done = install(home / ".local/lib/tandem", home, "--uninstall")
    assert (done.returncode, done.stderr) == (0, "")
    left = {str(path.relative_to(home)) for path in home.rglob("*") if not path.is_dir()}
    assert not left
    assert chats.is_dir()


def test_signs_of_the_shell_in_a_folder_are_quoted(archive: Path, tmp_path: Path) -> None:
    home = tmp_path / 'a $b`c "d" 100% & e|f \\g'
    assert install(archive, home, "--prefix", "x y").returncode == 0
    line = re.search('^Exec="(.*)" %f$', (home / ENTRY).read_text(), re.MULTILINE)
    assert line is not None
    value = line[1].replace("\\\\", "\\")  # the rule of strings, then that of quotes
    program = re.sub(r'\\(["`$\\])', r"\1", value).replace("%%", "%")
    assert Path(program) == home / "x y/bin/tandem"


def test_another_program_of_that_name_is_left_alone(archive: Path, tmp_path: Path) -> None:
    other = tmp_path / "home/.local/bin/tandem"
    other.parent.mkdir(parents=True)
    other.write_text("another")
    done = install(archive, tmp_path / "home")
    assert done.returncode == 1
    assert "is another program" in done.stderr
    assert other.read_text() == "another"
    assert not (tmp_path / "home/.local/lib").exists()


def test_a_c_library_that_is_too_old_is_a_sentence(archive: Path, tmp_path: Path) -> None:
    script = archive / "install.sh"
    script.write_text(script.read_text().replace("glibc=2.2", "glibc=99.1"))
    done = install(archive, tmp_path / "home")
    assert done.returncode == 1
    assert re.fullmatch(
        r"install\.sh: Tandem needs the GNU C library 99\.1 or later; this system has [\d.]+\.\n",
        done.stderr,
    )


@pytest.mark.parametrize(
    "options", [("--prefix",), ("--prefix", ""), ("--what",), ("--uninstall",)]
)
def test_wrong_options_are_sentences(
    archive: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = install(archive, tmp_path / "home", *options)
    assert done.returncode == 1
    assert re.fullmatch(r"install\.sh: .+\.\n", done.stderr)


def test_all_parts_bear_the_name_that_the_window_says() -> None:
    calls = {
        call
        for path in (ROOT / "app").rglob("*.py")
        for call in re.findall(r"setDesktopFileName\((.*?)\)", path.read_text(encoding="utf-8"))
    }
    assert calls == {f'"{APP_ID}"'}
    entry = (LINUX / f"{APP_ID}.desktop").read_text()
    assert f"Icon={APP_ID}" in entry.splitlines()
    assert "application/x-gguf" in entry
    metadata = (LINUX / f"{APP_ID}.metainfo.xml").read_text()
    assert f"<id>{APP_ID}</id>" in metadata
    assert f">{APP_ID}.desktop<" in metadata
    manifest = (ROOT / "packaging" / "flatpak" / f"{APP_ID}.yml").read_text()
    assert f"id: {APP_ID}\n" in manifest
