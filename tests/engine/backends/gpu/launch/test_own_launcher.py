"""Launching kernels without Triton's launcher, on a fake of NVIDIA's driver; the kernel cache."""

import ctypes
import logging
import os
import shutil
import struct
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.backends.gpu.launch import kernel_cache, own_launcher
from engine.backends.gpu.launch.own_launcher import (
    OwnDriver,
    OwnLauncher,
    Start,
    parameter_bytes,
    parameter_types,
)
from engine.errors import EngineError
from engine.hardware import backend_choice, cuda_api
from engine.hardware.cuda_api import CudaApi
from engine.hardware.fallbacks import Fallbacks
from engine.util.files import exposure
from tests.engine.backends.gpu.offline import run_offline
from tests.helpers.fake_cuda import OPT_IN_BYTES, FakeCuda

CASES = "tests.engine.backends.gpu.offline_cases"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Reset the choice of the launcher and the kernel cache; return the folder of the cache."""
    monkeypatch.setattr(own_launcher, "_found", {})
    monkeypatch.setenv("TANDEM_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    return tmp_path


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> Fallbacks:
    """Return an empty list in place of the one of this process."""
    found = Fallbacks()
    monkeypatch.setattr(own_launcher, "OF_THIS_PROCESS", found)
    monkeypatch.setattr(kernel_cache, "OF_THIS_PROCESS", found)
    return found


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the list of drivers that are made Triton's active one; its own cannot be built."""

    class Triton:
        @property
        def active(self) -> object:
            raise RuntimeError("Failed to find C compiler.\nmore of it")

        def set_active(self, made: object) -> None:
            found.append(made)

    found: list[object] = []
    monkeypatch.setattr(own_launcher, "_triton_driver", Triton)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Run the cases in a process where kernels are compiled; return their results.

    Kernels are kept where `test_targets` keeps them.
    """
    folder = str(Path(os.environ["TANDEM_KERNEL_CACHE"]) / "triton")
    names = (
        "packing", "signatures", "shared_memory", "other_parameters", "same_choice",
        "every_other_kernel",
    )  # fmt: skip
    return dict(run_offline(CASES, *names, TRITON_CACHE_DIR=folder))


def test_arguments_become_the_bytes_that_kernels_read(found: dict[str, Any]) -> None:
    assert found["packing"] == [
        [capability, "of_all_kinds", [3, 2, 1], 64, True, 4711]
        for capability in (75, 80, 86, 90, 120)
    ]


def test_kernels_are_started_as_triton_would(found: dict[str, Any]) -> None:
    """Every other kernel, which `test_targets` compiles for the same card."""
    names, n_start, wrong = found["every_other_kernel"]
    assert n_start >= len(names) > 20
    assert wrong == []


@pytest.mark.slow
def test_every_kernel_is_started_as_triton_would() -> None:
    folder = str(Path(os.environ["TANDEM_KERNEL_CACHE"]) / "triton")
    names, n_start, wrong = run_offline(CASES, "every_kernel", TRITON_CACHE_DIR=folder)[
        "every_kernel"
    ]
    assert {"attend", "dequantise", "gated", "products", "rotate", "store", "draw"} <= set(names)
    assert n_start > len(names)
    assert wrong == []


def test_known_launches_start_the_variant_that_triton_would_choose(found: dict[str, Any]) -> None:
    n_case, n_variant, wrong = found["same_choice"]
    assert 1 < n_variant < n_case
    assert wrong == []


@pytest.mark.skipif(
    sys.platform != "linux" or bool(backend_choice.launcher_problem()),
    reason="Triton's launcher cannot be compiled here",
)
def test_tritons_launcher_is_given_the_same() -> None:
    folder = str(Path(os.environ["TANDEM_KERNEL_CACHE"]) / "triton")
    found = run_offline(
        "tests.engine.backends.gpu.launch.tritons_launcher", TRITON_CACHE_DIR=folder
    )
    assert len(found) == 2, "the first start of a kernel, and one that is known"
    for shape, stream, function, values, wanted in found:
        assert (shape, stream, function) == ([3, 2, 1, 64], 4711, 99)
        assert values == wanted


def test_parameters_are_those_of_the_compiled_code(found: dict[str, Any]) -> None:
    for by_code, by_signature in found["signatures"]:
        assert by_code == by_signature


def test_much_shared_memory_is_asked_for(found: dict[str, Any]) -> None:
    attributes, n_bytes = found["shared_memory"]
    assert n_bytes > cuda_api.PLAIN_SHARED_BYTES
    assert attributes == [[cuda_api.FUNCTION_MOST_DYNAMIC_SHARED_BYTES, OPT_IN_BYTES - 16]]


def test_a_kernel_with_other_parameters_is_not_started(found: dict[str, Any]) -> None:
    assert "takes parameters of [8, 8, 4] bytes" in found["other_parameters"]


def test_what_cannot_be_passed_is_refused() -> None:
    signature = {"x": "*fp32", "S": "constexpr", "n": "i32"}
    assert parameter_types(signature) == [(0, "*"), (2, "i32")]
    assert parameter_bytes(signature) == [8, 4, 8, 8]
    with pytest.raises(ValueError, match="desc is of the type tensordesc"):
        parameter_types({"desc": "tensordesc<fp16[16,16]>"})
    for name, value in (("num_ctas", 2), ("launch_cooperative_grid", 1)):
        with pytest.raises(ValueError, match="needs clusters or a cooperative start"):
            launcher(CudaApi(FakeCuda()), **{name: value})


def launcher(api: CudaApi, signature: str = "x:*fp32 n:i32 f:fp32", **facts: Any) -> OwnLauncher:
    """Return a launcher of a kernel with these parameters, which has not been loaded."""
    plain = {
        "name": "kernel", "num_ctas": 1, "launch_cooperative_grid": False, "num_warps": 2,
        "shared": 64, "global_scratch_size": 0, "profile_scratch_size": 0,
    }  # fmt: skip
    source = SimpleNamespace(signature=dict(part.split(":") for part in signature.split()))
    return OwnLauncher(api, source, SimpleNamespace(**(plain | facts)), lambda: 0)


def loaded(fake: FakeCuda, signature: str = "x:*fp32 n:i32 f:fp32", **facts: Any) -> Start:
    """Return the start of a loaded kernel with these parameters."""
    api = CudaApi(fake)
    function = api.load("kernel", b"\x7fELF", 0, 0).function
    made = launcher(api, signature, **facts)
    return made.loaded(function, range(len(signature.split())))


def test_a_failure_of_the_driver_is_a_sentence() -> None:
    fake = FakeCuda(lambda name: [8, 4, 4, 8, 8])
    start = loaded(fake)
    fake._failing = ("cuLaunchKernel", 719)
    with pytest.raises(EngineError, match=r"made-up error 719.*cuLaunchKernel") as caught:
        start((1, 1, 1), 0, [0, 0, 0.0])
    assert caught.value.hint
    with pytest.raises(EngineError, match="made-up error 100"):
        CudaApi(FakeCuda(failing=("cuInit", 100)))
    api = CudaApi(FakeCuda())
    api.unload(7)
    assert api.parameter_bytes(1) is None, "an older driver does not tell"


def test_a_thread_without_a_context_gets_the_devices() -> None:
    fake = FakeCuda(lambda name: [8, 4, 4, 8, 8])
    start = loaded(fake)
    fake.context = None
    start((1, 1, 1), 0, [0, 0, 0.0])
    start((1, 1, 1), 0, [0, 0, 0.0])
    assert fake.context == 0
    assert len(fake.started) == 2
    assert fake.calls.count("cuLaunchKernel") == 3, "one failed"


def test_launches_of_several_threads_do_not_mix_their_arguments() -> None:
    together = threading.Barrier(2, timeout=60)

    class Slow(FakeCuda):
        """A driver with overlapping launches."""

        def _cuLaunchKernel(self, *args: Any) -> int:  # noqa: N802
            together.wait()
            return super()._cuLaunchKernel(*args)

    fake = Slow(lambda name: [8, 4, 4, 8, 8])
    start = loaded(fake)
    threads = [
        threading.Thread(target=start, args=((1, 1, 1), 0, [n, n, n + 0.5])) for n in (1000, 2000)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [
        [struct.pack("<Q", n), struct.pack("<i", n), struct.pack("<f", n + 0.5), bytes(8), bytes(8)]
        for n in (1000, 2000)
    ]
    assert sorted(values for *_, values in fake.started) == sorted(wanted)


def test_numbers_of_all_types_are_packed() -> None:
    signature = "a:*u8 b:i1 c:i8 d:i16 e:u32 f:i64 g:u64 h:fp64 i:fp32"
    sizes = [8, 1, 1, 2, 4, 8, 8, 8, 4, 8, 8]
    fake = FakeCuda(lambda name: sizes)
    values = [1 << 63, True, -5, -300, (1 << 32) - 1, -(1 << 62), (1 << 64) - 1, 0.1, 2.5]
    loaded(fake, signature)((1, 2, 3), 7, values)
    ((_, grid, threads, shared, stream, packed),) = fake.started
    assert (grid, threads, shared, stream) == ((1, 2, 3), 64, 64, 7)
    assert b"".join(packed) == struct.pack("<Q?bhIqQdf", *values) + bytes(16)


def test_scratch_memory_is_allocated_for_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def empty(n: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        asked.append(n)
        return torch.zeros(n, dtype=dtype)

    fake = FakeCuda(lambda name: [8, 8, 8])
    start = loaded(fake, "x:*u8", global_scratch_size=32)
    monkeypatch.setattr(own_launcher.torch, "empty", empty)
    start((2, 3, 1), 0, [16])
    assert asked == [192, 0]
    x, scratch, other = fake.started[0][-1]
    assert int.from_bytes(x, "little") == 16
    assert any(scratch)
    assert not any(other)


def test_without_nvidias_driver_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_api, "LIBRARY", "libthere-is-none.so.1")
    with pytest.raises(EngineError, match=r"libthere-is-none.so.1 cannot be opened"):
        CudaApi.open()


def test_triton_finds_what_it_asks_for() -> None:
    found = OwnDriver(CudaApi(FakeCuda())).utils.get_device_properties(0)
    assert found["max_shared_mem"] == OPT_IN_BYTES


def test_our_launcher_serves_where_tritons_cannot_be_made(
    fresh: Path, active: list[object], shared: Fallbacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    for problem in ("", "there is no C compiler"):  # detected by building, or known before
        monkeypatch.setattr(own_launcher, "launcher_problem", lambda problem=problem: problem)
        monkeypatch.setattr(own_launcher, "_found", {})
        assert own_launcher.prepare() == "own"
        assert own_launcher.prepare() == "own"
    assert len(active) == 2
    assert isinstance(active[0], OwnDriver)
    built, known = shared.current
    assert built.why.startswith("Triton's own launcher fails (")
    assert (known.kind, known.why) == ("launcher", "there is no C compiler")

    monkeypatch.setattr(own_launcher, "launcher_problem", lambda: "")
    monkeypatch.setattr(own_launcher, "_found", {})
    monkeypatch.setenv("TANDEM_LAUNCHER", "own")
    assert own_launcher.prepare() == "own"
    assert shared.current[-1].why == "TANDEM_LAUNCHER is set to “own”"
    assert shared.current[-1].help == "Unset the environment variable TANDEM_LAUNCHER."


def test_where_nothing_starts_kernels_there_is_a_sentence(
    fresh: Path, active: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_api, "LIBRARY", "libthere-is-none.so.1")
    for _ in range(2):
        with pytest.raises(EngineError, match="cannot be opened"):
            own_launcher.prepare()
    assert not active

    monkeypatch.setattr(own_launcher, "_found", {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # else it asks for ROCm's library
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(EngineError, match=r"AMD GPUs because Triton's own launcher fails \(Fai"):
        own_launcher.prepare()

    monkeypatch.setattr(own_launcher, "_found", {})
    monkeypatch.setattr(own_launcher, "triton_version", lambda: "")
    with pytest.raises(EngineError, match="Triton, which compiles the GPU kernels, is not"):
        own_launcher.prepare()


# --- the cache of compiled kernels


def test_kernels_are_kept_by_version_and_device(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "package_version", lambda: "2.0")
    for name, age_s in (("1.9-3.6-sm90", 1e9), ("1.9-3.6-sm86", 0), ("2.0-3.7-sm75", 1e9)):
        folder = fresh / "gpu" / name
        folder.mkdir(parents=True)
        (folder / "file").touch()
        stamp = folder.stat().st_mtime - age_s
        kernel_cache.os.utime(folder, (stamp, stamp))
    folder = kernel_cache.use_cache("sm90", "3.7")
    assert folder == fresh / "gpu" / "2.0-3.7-sm90"
    assert kernel_cache.cache_in_use() == str(folder)
    left = {path.name for path in folder.parent.iterdir()}
    assert left == {"1.9-3.6-sm86", "2.0-3.7-sm75", "2.0-3.7-sm90"}, "old ones go"


def test_the_users_own_folder_stays(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/their/own")
    assert kernel_cache.use_cache("sm90", "3.7") == Path("/their/own")
    assert kernel_cache.cache_in_use() == "/their/own"
    assert list(fresh.iterdir()) == []


def test_a_folder_that_takes_no_files_is_reported(
    fresh: Path, shared: Fallbacks, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    (fresh / "gpu").touch()
    with caplog.at_level(logging.WARNING):
        folder = kernel_cache.use_cache("sm90", "3.7")
    assert folder.is_dir()
    assert not folder.is_relative_to(fresh)
    assert "compiled again at each start" in caplog.text
    (found,) = shared.current
    assert (found.kind, found.devices) == ("compiling", ())
    assert found.sentence.startswith("GPU kernels are compiled again at each start: ")
    assert "is not writable" in found.why

    (fresh / "gpu").unlink()
    monkeypatch.setattr(kernel_cache, "NEEDED_BYTES", 1 << 62)
    assert "is full" in kernel_cache.writing_problem(fresh / "gpu")
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: None)
    monkeypatch.delenv("TANDEM_KERNEL_CACHE")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    assert kernel_cache.use_cache("sm90", "3.7").is_dir(), "a user without a home"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
@pytest.mark.parametrize("variable", ["TANDEM_KERNEL_CACHE", "TRITON_CACHE_DIR"])
@pytest.mark.parametrize("mode", [0o777, 0o770], ids=oct)
def test_a_folder_that_others_can_write_is_not_used(
    fresh: Path, shared: Fallbacks, monkeypatch: pytest.MonkeyPatch, variable: str, mode: int
) -> None:
    """Triton executes the kernels and programs in it."""
    folder = kernel_cache.use_cache("sm90", "3.7") if "TANDEM" in variable else fresh / "theirs"
    folder.mkdir(exist_ok=True)
    folder.chmod(mode)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder) if variable == "TRITON_CACHE_DIR" else "")
    used = kernel_cache.use_cache("sm90", "3.7")
    assert used != folder
    assert not exposure(used)
    assert kernel_cache.cache_in_use() == str(used)
    (found,) = shared.current
    assert found.why == f"{folder} is writable by other users"
    assert "only you can write" in found.help


def test_where_no_file_can_be_written_there_is_a_sentence(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(28, "No space left on device")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/their/own")
    kernel_cache.leave_cache("/their/own", full)
    kernel_cache.leave_cache("/their/own", full)  # another thread has already left it
    with pytest.raises(EngineError, match="no folder for compiled kernels"):
        kernel_cache.leave_cache(kernel_cache.cache_in_use(), full)


def test_long_or_foreign_paths_are_only_shortened_on_windows(tmp_path: Path) -> None:
    folder = tmp_path / "Ünïcode" / ("x" * 200)
    assert kernel_cache.short_path(folder) == folder


# --- missing tools


def test_what_tritons_launcher_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(backend_choice, "python_headers", lambda: tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "gcc" else None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(backend_choice.sys, "platform", "linux")
    assert backend_choice.launcher_problem().endswith(f"is missing in {tmp_path}")
    (tmp_path / "Python.h").touch()
    assert backend_choice.launcher_problem() == ""
    monkeypatch.setenv("CC", "nocc")
    assert "CC is 'nocc'" in backend_choice.launcher_problem()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert backend_choice.launcher_problem().startswith("there is no C compiler")
    monkeypatch.setattr(backend_choice.sys, "platform", "win32")
    assert backend_choice.launcher_problem() == "", "Triton for Windows brings a compiler along"
