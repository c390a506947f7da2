"""From LLVM code to functions that Python can call; what was compiled once is kept on disk."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding as llvm
from llvmlite import ir

from engine.cpu.kernels.isa import Isa
from engine.files import user_folder

Build = Callable[[ir.Module], None]

REVISION = 1
"""To be raised when the same text shall become other code."""

_lock = threading.Lock()
_engines: list[Any] = []  # compiled code lives as long as the program


def addresses(name: str, isa: Isa, names: Iterable[str], build: Build) -> dict[str, int]:
    """Compile a module, or find it compiled on disk.

    Args:
        name: of the module, for people who look at the files.
        names: the functions wanted.
        build: writes the module; must give the same text each time.

    Returns:
        The address of each function.
    """
    with _lock:
        machine = _machine(isa)
        text = _text(name, build, machine)
        code = _stored(f"{name}-{_digest(text, isa)}", lambda: _compile(text, machine))
        return _link(code, machine, names)


def addresses_by_source(name: str, isa: Isa, names: Iterable[str], build: Build) -> dict[str, int]:
    """The same for a module of this package, which its name tells from all others of it.

    What is on disk is then found by the package's source, without writing the module anew, which
    takes longer than to load it.
    """
    sources = _sources()
    if not sources:
        return addresses(name, isa, names, build)
    with _lock:
        machine = _machine(isa)
        known = f"{name}-{_digest(f'{machine.triple} {sources}', isa)}"
        code = _stored(known, lambda: _compile(_text(name, build, machine), machine))
        return _link(code, machine, names)


@cache
def _sources() -> str:
    """Return a hash of all sources that shape the code; empty where they are not installed."""
    quants = Path(__file__).parents[2] / "quants"
    files = [*sorted(Path(__file__).parent.glob("*.py")), *sorted(quants.glob("*.py"))]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest() if files else ""


def _stored(name: str, make: Callable[[], bytes]) -> bytes:
    """Compiled code from disk, or made and kept there."""
    folder = cache_folder()
    path = folder / f"{name}.o" if folder else None
    code = _read(path) if path else None
    if code is None:
        code = make()
        if path:
            _write(path, code)
    return code


def cache_folder() -> Path | None:
    """Where compiled kernels are kept: `TANDEM_KERNEL_CACHE`, or the user's cache folder.

    None if there is no such folder: some containers run as a user without a home.
    """
    if named := os.environ.get("TANDEM_KERNEL_CACHE"):
        return Path(named)
    base = user_folder("cache")
    return base and base / "tandem" / "kernels"


def assembly(isa: Isa, build: Build, triple: str = "") -> str:
    """What a module becomes, in the processor's own language; for tests and for people."""
    machine = _machine(isa, triple)
    return str(machine.emit_assembly(_optimised(_text("shown", build, machine), machine)))


def object_file(isa: Isa, build: Build, triple: str = "") -> bytes:
    """What a module becomes for any linker, also another system's; for tests."""
    machine = _machine(isa, triple)
    return _compile(_text("shown", build, machine), machine)


def _machine(isa: Isa, triple: str = "") -> Any:
    """What LLVM makes code for."""
    if triple:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    else:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        triple = str(llvm.get_process_triple())
        _know_windows()
    triple, feature = _target(triple)
    features = ",".join(filter(None, (isa.features, feature)))
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=isa.cpu, features=features, opt=3, jit=True
    )


def _target(triple: str) -> tuple[str, str]:
    """What LLVM shall take a system for, and a feature or "".

    Its linker in memory cannot do Windows' own format. On ARM functions are called there as on
    Linux, but for register x18; LLVM 22 cannot compile all kernels for Windows on ARM in ELF.
    """
    if "windows" not in triple:
        return triple, ""
    if triple.startswith(("aarch64", "arm64")):
        return "aarch64-unknown-linux-gnu", "+reserve-x18"
    return triple.removesuffix("-elf") + "-elf", ""


def _know_windows() -> None:
    """Tell LLVM where Windows has what functions with more than 4 KiB of variables call."""
    if sys.platform == "win32":
        function = ctypes.WinDLL("ntdll").__chkstk
        llvm.add_symbol("__chkstk", ctypes.cast(function, ctypes.c_void_p).value)


def _text(name: str, build: Build, machine: Any) -> str:
    module = ir.Module(name)
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    build(module)
    return str(module)


def _optimised(text: str, machine: Any) -> Any:
    module = llvm.parse_assembly(text)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling = False  # the kernels are unrolled as they should be
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


def _compile(text: str, machine: Any) -> bytes:
    return bytes(machine.emit_object(_optimised(text, machine)))


def _digest(text: str, isa: Isa) -> str:
    about = (REVISION, llvmlite.__version__, isa.cpu, isa.features)
    return hashlib.sha256(f"{about}\n{text}".encode()).hexdigest()[:24]


def _read(path: Path) -> bytes | None:
    """What is kept under a name, if it is whole: a hash of the code stands before it."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    mark, code = stored[:32], stored[32:]
    return code if hashlib.sha256(code).digest() == mark else None


def _write(path: Path, code: bytes) -> None:
    """Keep compiled code; another program may do so at the same time. A full disk does no harm."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(temporary, path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)


def _link(code: bytes, machine: Any, names: Iterable[str]) -> dict[str, int]:
    """Put compiled code into memory where it can be called."""
    empty = llvm.parse_assembly("")
    engine = llvm.create_mcjit_compiler(empty, machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    found = {name: int(engine.get_function_address(name)) for name in names}
    for name, address in found.items():
        if not address:
            raise KeyError(name)
    return found
