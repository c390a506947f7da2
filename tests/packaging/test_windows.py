"""setup.exe: what it is told, what it holds, and trees that would not work on Windows."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from making.project import ROOT, Project
from making.windows import tree as windows_tree
from making.windows.binaries import SYSTEM_LIBRARIES, is_of_windows
from making.windows.launchers import ICON_SIZES, version_numbers, write_ico, write_launchers
from making.windows.pywin32 import prune_pywin32
from making.windows.setup import build_setup, check_setup
from making.windows.tree import (
    MAX_PATH,
    RUNTIME,
    check_tree,
    copy_python,
    path_lines,
    place_runtime,
)

SOURCES = ROOT / "packaging" / "windows"
needs_mingw = pytest.mark.skipif(not SYSTEM_LIBRARIES.is_dir(), reason="needs mingw-w64")
needs_nsis = pytest.mark.skipif(
    not (shutil.which("makensis") and shutil.which("7z")), reason="needs makensis and 7z"
)


def filled(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"file")
    return folder


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("1.2.3", "1.2.3.0"), ("0.1", "0.1.0.0"), ("1.2.0rc1", "1.2.0.0"), ("2.0.dev4", "2.0.0.0")],
)
def test_a_version_is_written_as_the_four_numbers_that_windows_compares(
    version: str, numbers: str
) -> None:
    assert ".".join(version_numbers(version)) == numbers


def test_the_icon_has_all_sizes(tmp_path: Path) -> None:
    write_ico(ROOT / "resources" / "tandem.svg", tmp_path / "icon.ico")
    data = (tmp_path / "icon.ico").read_bytes()
    assert struct.unpack_from("<HHH", data) == (0, 1, len(ICON_SIZES))
    end = 6 + 16 * len(ICON_SIZES)
    for number, size in enumerate(ICON_SIZES):
        entry = struct.unpack_from("<BBBBHHII", data, 6 + 16 * number)
        assert entry[0] == entry[1] == size % 256
        assert entry[-1] == end
        assert data[end:].startswith(b"\x89PNG")
        assert struct.unpack_from(">II", data, end + 16) == (size, size)
        end += entry[-2]
    assert end == len(data)


def test_every_text_of_the_installer_is_there_in_both_languages() -> None:
    used = set(re.findall(r"\$\((\w+)\)", (SOURCES / "setup.nsi").read_text(encoding="utf-8")))
    texts = (SOURCES / "texts.nsh").read_text(encoding="utf-8").replace("\\\n", " ")
    told = re.findall(r'^!insertmacro TEXT (\w+)\s+"([^"]+)"\s+"([^"]+)"$', texts, re.MULTILINE)
    assert used == {name for name, _, _ in told}
    assert len(told) == texts.count("!insertmacro TEXT")


@needs_nsis
def test_a_setup_holds_the_tree_and_nothing_else(tmp_path: Path) -> None:
    tree = filled(tmp_path / "tree", "Tandem.exe", "bin/uv.exe", "src/app/ü [1].py", "src/$x")
    setup = build_setup(tree, tmp_path / "tandem-setup.exe", Project("1.2.3", 1_700_000_000, 0))
    names = (tmp_path / "tandem-setup.contents.txt").read_text().splitlines()
    assert names == ["Tandem.exe", "bin/uv.exe", "src/$x", "src/app/ü [1].py", "uninstall.exe"]
    with pytest.raises(SystemExit, match="lacks"):
        check_setup(setup, names[1:], tree)
    with pytest.raises(SystemExit, match="more"):
        check_setup(setup, [*names, "more"], tree)


@needs_mingw
def test_the_launchers_are_programs_of_both_kinds(tmp_path: Path) -> None:
    filled(tmp_path, "python/python311.dll", "python/python3.dll", "bin/uv.exe")
    write_launchers(tmp_path, Project("1.2.3", 1_700_000_000))
    for name, subsystem in (("Tandem.exe", 2), ("bin/tandem.exe", 3)):
        data = (tmp_path / name).read_bytes()
        (header,) = struct.unpack_from("<I", data, 0x3C)
        assert struct.unpack_from("<H", data, header + 0x5C) == (subsystem,)
        for text in ("python311.dll", "1.2.3"):
            assert text.encode("utf-16-le") in data
        assert b"longPathAware" in data


@needs_mingw
def test_libraries_of_windows_are_known_and_the_runtime_of_visual_c_is_not_one() -> None:
    for name in ("kernel32.dll", "api-ms-win-crt-math-l1-1-0.dll", "icuuc.dll", "dwmapi.dll"):
        assert is_of_windows(name), name
    for name in ("vcruntime140_1.dll", "msvcp140.dll", "qt6core.dll", "libgcc_s_seh-1.dll"):
        assert not is_of_windows(name), name


def test_python_is_copied_without_its_tests_and_with_its_headers(tmp_path: Path) -> None:
    source = filled(
        tmp_path / "source", "python.exe", "python3.dll", "python311.dll", "vcruntime140.dll",
        "DLLs/_ssl.pyd", "DLLs/_testcapi.pyd", "DLLs/tcl86t.dll", "Lib/os.py", "Lib/test/x.py",
        "Lib/unittest/test/x.py", "Lib/tkinter/x.py", "include/Python.h", "libs/python311.lib",
        "Scripts/pip.exe",
    )  # fmt: skip
    copy_python(source, tmp_path / "python")
    names = {p.relative_to(tmp_path / "python").as_posix()
             for p in (tmp_path / "python").rglob("*") if p.is_file()}  # fmt: skip
    assert names == {
        "python.exe", "python3.dll", "python311.dll", "vcruntime140.dll", "DLLs/_ssl.pyd",
        "Lib/os.py", "include/Python.h", "libs/python311.lib",
    }  # fmt: skip
    with pytest.raises(SystemExit, match="no CPython for Windows"):
        copy_python(tmp_path / "python" / "Lib", tmp_path / "other")


def test_one_runtime_of_visual_c_lies_beside_python(tmp_path: Path) -> None:
    wheels = [f"site/{package}/{name}" for package in ("shiboken6", "PySide6") for name in RUNTIME]
    filled(tmp_path, *wheels, "site/PySide6/vcamp140.dll", "site/PySide6/Qt6Core.dll", "python/x")
    place_runtime(tmp_path)
    found = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.dll")}
    assert found == {"site/PySide6/Qt6Core.dll", *(f"python/{name}" for name in RUNTIME)}


def test_python_finds_the_parts_of_pywin32_that_end_programs(tmp_path: Path) -> None:
    packages = tmp_path / "python" / "Lib" / "site-packages"
    kept = ("win32/win32job.pyd", "win32/lib/pywintypes.py", "pywin32_system32/pywintypes311.dll")
    filled(
        tmp_path / "site", *kept, "win32com/x.py", "pywin32_system32/pythoncom311.dll",
        "pythonwin/mfc140u.dll", "win32/Demos/x.py",
    )  # fmt: skip
    packages.mkdir(parents=True)
    prune_pywin32(tmp_path / "site")
    found = {
        p.relative_to(tmp_path / "site").as_posix() for p in tmp_path.rglob("*") if p.is_file()
    }
    assert found == set(kept)
    known = [packages / line for line in path_lines().splitlines()]
    folders = {path.resolve().relative_to(tmp_path).as_posix() for path in known}
    assert folders == {"src", "site", "site/win32", "site/win32/lib"}


def test_an_incomplete_tree_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_tree, "missing_libraries", lambda _: ["a.pyd loads b.dll"])
    long = "x" * MAX_PATH
    filled(tmp_path, "Tandem.exe", f"src/{long}")
    with pytest.raises(SystemExit) as caught:
        check_tree(tmp_path)
    text = str(caught.value)
    assert "bin/uv.exe is missing" in text
    assert "a.pyd loads b.dll" in text
    assert f"{long} has a path of" in text
    assert "Tandem.exe is missing" not in text


def test_the_script_for_wine_is_a_script() -> None:
    subprocess.run(["sh", "-n", str(SOURCES / "try_setup")], check=True)
