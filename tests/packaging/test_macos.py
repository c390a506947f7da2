"""Tandem.app: its description, its icon, and Mach-O files."""

from __future__ import annotations

import plistlib
import struct
import subprocess
from pathlib import Path

import pytest
from making.macos.binaries import ARM64, loaded_libraries, mach_files, missing_libraries, thin
from making.macos.bundle import ICON_PARTS, copy_python, information, least_system, write_icns
from making.project import ROOT, Project

X86_64 = 0x01000007


def mach(*libraries: str, kind: int = ARM64) -> bytes:
    """Return the head of a Mach-O file that loads libraries."""
    commands = struct.pack("<II", 0x1B, 24) + bytes(16)  # an identifier
    for name in libraries:
        text = name.encode() + b"\0" * (8 - len(name) % 8)
        commands += struct.pack("<IIIIII", 0xC, 24 + len(text), 24, 0, 0, 0) + text
    head = struct.pack("<IIIIIIII", 0xFEEDFACF, kind, 0, 6, 1 + len(libraries), len(commands), 0, 0)
    return head + commands


def fat(*parts: tuple[int, bytes]) -> bytes:
    """Return a file for several processors."""
    entries, body, start = b"", b"", 8 + 20 * len(parts)
    for kind, part in parts:
        entries += struct.pack(">IIIII", kind, 0, start + len(body), len(part), 0)
        body += part
    return struct.pack(">II", 0xCAFEBABE, len(parts)) + entries + body


def test_a_file_for_several_processors_is_thinned(tmp_path: Path) -> None:
    path = tmp_path / "library.dylib"
    part = mach("/usr/lib/libSystem.B.dylib", "@rpath/QtCore.framework/Versions/A/QtCore")
    path.write_bytes(fat((X86_64, mach(kind=X86_64)), (ARM64, part)))
    libraries = ["/usr/lib/libSystem.B.dylib", "@rpath/QtCore.framework/Versions/A/QtCore"]
    assert loaded_libraries(path) == libraries
    thin(path)
    assert path.read_bytes() == part
    thin(path)
    assert loaded_libraries(path) == libraries


def test_a_file_for_other_processors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "library.dylib"
    for data in (mach(kind=X86_64), fat((X86_64, mach(kind=X86_64)))):
        path.write_bytes(data)
        with pytest.raises(SystemExit, match="Apple's own processors"):
            thin(path)


def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.so").write_bytes(mach("@rpath/b.dylib", "/System/Library/x", "@rpath/c.dylib"))
    (tmp_path / "b.dylib").write_bytes(mach())
    (tmp_path / "text").write_text("no")
    files = mach_files(tmp_path)
    assert [path.name for path in files] == ["a.so", "b.dylib"]
    assert missing_libraries(tmp_path, files) == ["a.so loads @rpath/c.dylib"]


def test_the_description_opens_model_files() -> None:
    told = plistlib.loads(plistlib.dumps(information(Project("1.2.3", 0), "13.0")))
    assert told["CFBundleShortVersionString"] == told["CFBundleVersion"] == "1.2.3"
    assert told["LSMinimumSystemVersion"] == "13.0"
    (document,), (kind,) = told["CFBundleDocumentTypes"], told["UTImportedTypeDeclarations"]
    assert document["LSItemContentTypes"] == [kind["UTTypeIdentifier"]]
    assert kind["UTTypeTagSpecification"] == {"public.filename-extension": ["gguf"]}


def test_the_oldest_macos_is_the_one_that_all_libraries_promise(tmp_path: Path) -> None:
    tags = {
        "a": "Tag: cp311-abi3-macosx_13_0_universal2\n", "b": "Tag: py3-none-any\n",
        "c": "Tag: cp311-cp311-macosx_14_0_arm64\nTag: cp311-cp311-macosx_11_0_arm64\n",
    }  # fmt: skip
    for name, text in tags.items():
        (tmp_path / f"{name}.dist-info").mkdir()
        (tmp_path / f"{name}.dist-info" / "WHEEL").write_text(text)
    assert least_system(tmp_path) == "13.0"


def test_the_icon_has_all_sizes(tmp_path: Path) -> None:
    write_icns(ROOT / "resources" / "tandem.svg", tmp_path / "icon.icns")
    data = (tmp_path / "icon.icns").read_bytes()
    assert struct.unpack_from(">4sI", data) == (b"icns", len(data))
    place, found = 8, {}
    while place < len(data):
        kind, length = struct.unpack_from(">4sI", data, place)
        found[kind] = struct.unpack_from(">I", data, place + 24)[0]
        place += length
    assert found == ICON_PARTS


def test_a_folder_without_a_cpython_for_macos_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no CPython for macOS"):
        copy_python(tmp_path, tmp_path / "python")


def test_the_script_for_images_is_a_script() -> None:
    script = ROOT / "packaging" / "macos" / "make_dmg"
    subprocess.run(["sh", "-n", str(script)], check=True)
