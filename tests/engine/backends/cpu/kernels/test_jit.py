"""The disk cache of compiled kernels, with corrupted, missing and foreign files."""

import ast
import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.kernels.language.values import I64, function
from engine.backends.cpu.kernels.running import jit
from engine.util.files import exposed, exposure
from tests.helpers.golden import REPO

WITHOUT_IR = {
    "engine.load_params", "engine.backends.cpu.large_pages", "engine.errors", "engine.util.files",
    "engine.model.forward.cache",
    "engine.model.forward.batch", "engine.model.forward.recording",
    "engine.model.layers.mixers.attention",
}  # fmt: skip
"""Modules that kernel modules import only for Python code and types."""


def _build(module: ir.Module) -> None:
    """Write `add_three(n)` and `twice(n)`."""
    for name in ("add_three", "twice"):
        code, (n,) = function(module, name, 1, I64)
        code.builder.ret((n + 3 if name == "add_three" else n * 2).raw)


def results(name: str = "sums") -> list[int]:
    """Call both functions of a module with 20."""
    found = jit.addresses(name, chosen(), ["add_three", "twice"], _build)
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    return [kind(found[key])(20) for key in ("add_three", "twice")]


class Compiler:
    """Counter of compilations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_modules = 0
        compiled = jit._compile

        def counting(text: str, machine: object) -> bytes:
            self.n_modules += 1
            return compiled(text, machine)

        monkeypatch.setattr(jit, "_compile", counting)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a path for the cache that does not exist yet."""
    path = tmp_path / "deep" / "kernels"
    monkeypatch.setenv("TANDEM_KERNEL_CACHE", str(path))
    return path


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


def test_compiled_modules_are_cached(folder: Path, compiler: Compiler) -> None:
    assert results() == [23, 40]
    assert [path.suffix for path in folder.iterdir()] == [".o"]
    assert results() == [23, 40]
    assert compiler.n_modules == 1


def test_modules_and_instruction_sets_have_separate_files(folder: Path) -> None:
    isa = chosen()
    other = type("Other", (type(isa),), {"features": isa.features + ",+sse2"})()
    names = {
        jit._digest(text, kind)
        for text in ("a", "b")
        for kind in (isa, other)
    }  # fmt: skip
    assert len(names) == 4


@pytest.mark.parametrize("left", [0, 1, 31, 32, 33, -1])
def test_a_truncated_file_is_recompiled(folder: Path, compiler: Compiler, left: int) -> None:
    results()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    assert results() == [23, 40]
    assert compiler.n_modules == 2
    assert path.read_bytes() == whole


@pytest.mark.parametrize("place", [0, 40, -1])
def test_a_corrupted_file_is_recompiled(folder: Path, compiler: Compiler, place: int) -> None:
    results()
    (path,) = folder.iterdir()
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 1
    path.write_bytes(damaged)
    assert results() == [23, 40]
    assert compiler.n_modules == 2


def test_a_missing_folder_is_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TANDEM_KERNEL_CACHE", str(tmp_path / "file" / "kernels"))
    assert results() == [23, 40]


def test_a_full_disk_is_harmless(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert results() == [23, 40]
    assert list(folder.iterdir()) == []


def test_a_folder_in_place_of_a_file_is_harmless(folder: Path, compiler: Compiler) -> None:
    results()
    (path,) = folder.iterdir()
    path.unlink()
    path.mkdir()
    assert results() == [23, 40]
    assert list(folder.iterdir()) == [path]


needs_owners = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
needs_root = pytest.mark.skipif(
    sys.platform == "win32" or os.geteuid() != 0, reason="only root can give files away"
)
OTHER_USER = 12345


def test_what_is_kept_is_for_this_user_alone(folder: Path) -> None:
    results()
    (path,) = folder.iterdir()
    assert not any(exposed(place.stat()) for place in (path, folder, folder.parent))


@needs_owners
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o775, 0o757, 0o722, 0o1777], ids=oct)
def test_a_folder_that_others_can_write_is_not_used(
    folder: Path, compiler: Compiler, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    results()
    (path,) = folder.iterdir()
    folder.chmod(mode)
    assert exposure(folder) == f"{folder} is writable by other users"
    assert results() == results("others") == [23, 40]
    assert compiler.n_modules == 3, "nothing is read from there"
    assert list(folder.iterdir()) == [path], "nor written"
    assert caplog.text.count(str(folder)) == 1, "it is said once"
    folder.chmod(0o755)
    results()
    assert compiler.n_modules == 3


@needs_owners
def test_a_folder_that_everybody_can_replace_is_not_used(folder: Path, compiler: Compiler) -> None:
    results()
    folder.parent.chmod(0o777)
    assert "is writable by everyone" in exposure(folder)
    results()
    assert compiler.n_modules == 2
    folder.parent.chmod(0o1777)  # like /tmp, where only owners can replace their files
    results()
    assert compiler.n_modules == 2


@needs_owners
def test_a_file_that_others_can_write_is_recompiled(folder: Path, compiler: Compiler) -> None:
    results()
    (path,) = folder.iterdir()
    path.chmod(0o666)
    assert results() == [23, 40]
    assert compiler.n_modules == 2
    assert not exposed(path.stat()), "it is replaced"


@needs_root
def test_a_folder_or_file_of_another_user_is_not_used(folder: Path, compiler: Compiler) -> None:
    results()
    (path,) = folder.iterdir()
    os.chown(path, OTHER_USER, -1)
    results()
    assert compiler.n_modules == 2
    os.chown(folder, OTHER_USER, -1)
    assert exposure(folder) == f"{folder} belongs to another user"
    results()
    assert compiler.n_modules == 3


def test_a_user_without_a_home_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TANDEM_KERNEL_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)

    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    assert jit.cache_folder() is None
    assert results() == [23, 40]


def test_the_folder_is_the_users_cache_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_KERNEL_CACHE", "named")
    assert jit.cache_folder() == Path("named")
    monkeypatch.setenv("TANDEM_KERNEL_CACHE", "")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert jit.cache_folder() == Path("/caches/tandem/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert jit.cache_folder() == Path("/home/me/.cache/tandem/kernels")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert jit.cache_folder() == Path("/home/me/Library/Caches/tandem/kernels")


PROGRAM = """
import ctypes
from gguf.constants import GGMLQuantizationType as Kind
from engine.backends.cpu.kernels.packing import pack
from engine.backends.cpu.kernels.products import panel_packing, quantised_gemm
from engine.backends.cpu.kernels.running import jit
from engine.backends.cpu.kernels.language.isa import chosen
from engine.formats.quants.layout import LAYOUTS
isa, kind = chosen(), Kind.Q4_K
builds = {
    "multiply": lambda m: quantised_gemm.build(m, isa, LAYOUTS[kind]),
    "pack": lambda m: pack.build(m, kind),
    "quantise": lambda m: panel_packing.build(m, isa, panel_packing.format_of(isa, 1)),
}
for name, build in builds.items():
    assert jit.addresses(name, isa, [name], build)[name]
"""


def start(seed: int) -> subprocess.Popen[bytes]:
    """Start a program that compiles some kernels."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONHASHSEED": str(seed)}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment)


def test_two_programs_at_once_write_the_same_whole_files(folder: Path) -> None:
    programs = [start(seed) for seed in (1, 2)]
    assert [program.wait(120) for program in programs] == [0, 0]
    written = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(written) == 3, "the text differs from one program to the other"
    third = start(3)
    assert third.wait(120) == 0
    assert {path: path.read_bytes() for path in folder.iterdir()} == written


def test_missing_functions_raise(folder: Path) -> None:
    with pytest.raises(KeyError, match="thrice"):
        jit.addresses("sums", chosen(), ["twice", "thrice"], _build)


def test_the_cache_key_covers_all_sources_of_the_ir() -> None:
    package = Path(jit.__file__).parents[1]
    imported = {
        node.module
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("engine.")
    }
    elsewhere = {name for name in imported if not name.startswith("engine.backends.cpu.kernels")}
    hashed = {
        f"engine.{name.removesuffix('.py').replace('/', '.')}" for name in jit.SOURCES_ELSEWHERE
    }
    assert elsewhere - WITHOUT_IR == hashed, "a change there would leave old kernels in use"
