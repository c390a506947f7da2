"""Compiles LLVM IR to native functions, with an on-disk cache of object code."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding as llvm
from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.util.files import atomic_write, exposed, exposure, make_private, user_folder

log = logging.getLogger(__name__)

Build = Callable[[ir.Module], None]
"""Function that writes a module's IR."""

REVISION = 1
"""Part of all cache keys; increase it when the same IR compiles differently."""

SOURCES_ELSEWHERE = (
    "formats/quants/layout.py", "model/forward/operands.py", "model/forward/pages.py",
    "model/forward/state.py",
)  # fmt: skip
"""Files outside this package that contain constants and formulas that end up in the IR."""

_lock = threading.Lock()
_engines: list[Any] = []  # compiled code lives as long as the process


def addresses(name: str, isa: Isa, names: Iterable[str], build: Build) -> dict[str, int]:
    """Compile a module, or load it from the disk cache, where its key is a hash of its IR.

    Args:
        name: name of the module, used in the cached files' names.
        isa: instruction set to compile for.
        names: names of the functions to return.
        build: function that writes the module; it must write the same IR each time.

    Returns:
        The addresses of the functions.
    """
    with _lock:
        machine = _target_machine(isa)
        text = _write_ir(name, build, machine)
        code = _cached(f"{name}-{_digest(text, isa)}", lambda: _compile(text, machine))
        return _link(code, machine, names)


def addresses_by_source(name: str, isa: Isa, names: Iterable[str], build: Build) -> dict[str, int]:
    """Compile a module, or load it from the disk cache, where its key is a hash of all sources.

    For modules in this package, with unique names. A cached module's IR is not even generated, as
    that would take longer than loading the module.
    """
    sources = _sources()
    if not sources:
        return addresses(name, isa, names, build)
    with _lock:
        machine = _target_machine(isa)
        known = f"{name}-{_digest(f'{machine.triple} {sources}', isa)}"
        code = _cached(known, lambda: _compile(_write_ir(name, build, machine), machine))
        return _link(code, machine, names)


@cache
def _sources() -> str:
    """Return a hash of the sources on which the IR depends; "" if they are not installed."""
    package = Path(__file__).parents[1]
    files = sorted(package.rglob("*.py"))
    if not files:
        return ""
    files += [package.parents[2] / name for name in SOURCES_ELSEWHERE]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _cached(name: str, make: Callable[[], bytes]) -> bytes:
    """Read object code from the disk cache, or compile it and store it there.

    Does not use a folder that other users can write to.
    """
    folder = cache_folder()
    if folder and (why := exposure(folder)):
        _warn(why)
        folder = None
    path = folder / f"{name}.o" if folder else None
    code = _read(path) if path else None
    if code is None:
        code = make()
        if path:
            _write(path, code)
    return code


@cache
def _warn(why: str) -> None:
    log.warning("CPU kernels are compiled at each start: %s", why)


def cache_folder() -> Path | None:
    """Return the disk cache's folder: `TANDEM_KERNEL_CACHE`, or one in the user's cache folder.

    None if there is neither, as in containers whose user has no home.
    """
    if named := os.environ.get("TANDEM_KERNEL_CACHE"):
        return Path(named)
    base = user_folder("cache")
    return base and base / "tandem" / "kernels"


def assembly(isa: Isa, build: Build, triple: str = "") -> str:
    """Return a compiled module's assembly, for tests and debugging."""
    machine = _target_machine(isa, triple)
    return str(machine.emit_assembly(_optimise(_write_ir("shown", build, machine), machine)))


def object_file(isa: Isa, build: Build, triple: str = "") -> bytes:
    """Return a compiled module's object file, for tests; `triple` selects another system."""
    machine = _target_machine(isa, triple)
    return _compile(_write_ir("shown", build, machine), machine)


def _target_machine(isa: Isa, triple: str = "") -> Any:
    """Return LLVM's target machine for an instruction set, on this system or `triple`."""
    if triple:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    else:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        triple = str(llvm.get_process_triple())
        _define_windows_symbols()
    triple, feature = _target(triple)
    features = ",".join(filter(None, (isa.features, feature)))
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=isa.cpu, features=features, opt=3, jit=True
    )


def _target(triple: str) -> tuple[str, str]:
    """Return the triple to compile for, and a feature string or "".

    Windows uses ELF because LLVM's in-memory linker cannot load COFF. Code for Windows on ARM is
    compiled as if for Linux, because LLVM 22 cannot compile all kernels for it as ELF; the calling
    conventions differ only in register x18.
    """
    if "windows" not in triple:
        return triple, ""
    if triple.startswith(("aarch64", "arm64")):
        return "aarch64-unknown-linux-gnu", "+reserve-x18"
    return triple.removesuffix("-elf") + "-elf", ""


def _define_windows_symbols() -> None:
    """Tell LLVM the address of `__chkstk`, which Windows functions with large frames call."""
    if sys.platform == "win32":
        function = ctypes.WinDLL("ntdll").__chkstk
        llvm.add_symbol("__chkstk", ctypes.cast(function, ctypes.c_void_p).value)


def _write_ir(name: str, build: Build, machine: Any) -> str:
    module = ir.Module(name)
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    build(module)
    return str(module)


def _optimise(text: str, machine: Any) -> Any:
    module = llvm.parse_assembly(text)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling = False  # kernels unroll their own loops
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


def _compile(text: str, machine: Any) -> bytes:
    return bytes(machine.emit_object(_optimise(text, machine)))


def _digest(text: str, isa: Isa) -> str:
    """Return a cache key: a hash of the text, the compiler and the target."""
    about = (REVISION, llvmlite.__version__, isa.cpu, isa.features)
    return hashlib.sha256(f"{about}\n{text}".encode()).hexdigest()[:24]


def _read(path: Path) -> bytes | None:
    """Read object code; None if the file is missing, corrupted, or writable by other users."""
    try:
        with path.open("rb") as file:
            stored = b"" if exposed(os.fstat(file.fileno())) else file.read()
    except OSError:
        return None
    mark, code = stored[:32], stored[32:]
    return code if hashlib.sha256(code).digest() == mark else None


def _write(path: Path, code: bytes) -> None:
    """Store object code atomically; ignore errors such as a full disk."""
    with suppress(OSError):
        make_private(path.parent)
        with atomic_write(path, is_durable=False) as file:
            file.write(hashlib.sha256(code).digest() + code)


def _link(code: bytes, machine: Any, names: Iterable[str]) -> dict[str, int]:
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
