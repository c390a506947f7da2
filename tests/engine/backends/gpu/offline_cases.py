# ruff: noqa: N803 what a kernel is compiled for is written in capitals
"""Cases of `test_own_launcher` and `test_compiling`, for a process that compiles kernels."""

import itertools
import json
import os
import struct
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import JITFunction

from engine.backends.gpu.launch import kernel_launch, own_launcher
from engine.backends.gpu.launch.configs import KernelTarget
from engine.backends.gpu.launch.kernel_cache import leave_cache
from engine.backends.gpu.launch.kernel_launch import (
    Compiling,
    KernelLaunch,
    compile_launch,
    intercept_launches,
    launch,
    variant_key,
    variants,
)
from engine.backends.gpu.loading.dry_run import collect_launches
from engine.formats.gguf.reader import GGUFFile
from engine.load_params import LoadParams
from engine.model.architectures.declare import declare
from engine.runtime.rank import warm_rows
from tests.engine.backends.gpu.offline import offline, on_fake_gpu, parameter_bytes
from tests.engine.backends.gpu.targets import half_of, starts_for
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.hollow import hollow_llama, hollow_moe

CPU = torch.device("cpu")


@triton.jit(do_not_specialize=["plain"])
def of_all_kinds(a, b, n, plain, one, far, f, flag, SIZE: tl.constexpr):
    """Take arguments of all kinds."""
    at = tl.arange(0, SIZE)
    value = tl.load(a + at).to(tl.float32) * f + n + plain + one + far + tl.where(flag, 1.0, 2.0)
    tl.store(b + at, value.to(tl.int8))


@triton.jit
def of_much_memory(a, b, c, SIZE: tl.constexpr):
    """Use more shared memory than a kernel has without asking."""
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for step in range(4):
        total += tl.dot(tl.load(a + at + step), tl.load(b + at + step))
    tl.store(c + at, total)


def packing() -> object:
    """Pack arguments of all kinds into bytes, for each kind of GPU; the second launch is known."""
    a, b = torch.zeros(64, dtype=torch.float16), torch.zeros(64, dtype=torch.int8)
    far = 1 << 40
    found = []
    for capability in (75, 80, 86, 90, 120):
        sizes: list[int] = []
        fake = FakeCuda(lambda name, sizes=sizes: sizes)
        with on_fake_gpu(GPUTarget("cuda", capability, 32), fake):
            start = KernelLaunch(
                of_all_kinds, (3, 2), (a, b[1:], 48, -3, 1, far, 2.5, True), {"SIZE": 16}, 2, 2
            )
            kernel = compile_launch(start, CPU)
            sizes += parameter_bytes(kernel.asm["ptx"])
            for x, y, f, flag in ((a, b[1:], 2.5, True), (a[8:], b[3:], -0.125, False)):
                launch(
                    of_all_kinds, (3, 2), x, y, 48, -3, 1, far, f, flag, num_warps=2, SIZE=16
                )  # fmt: skip
                wanted = [
                    struct.pack("<Q", x.data_ptr()), struct.pack("<Q", y.data_ptr()),
                    struct.pack("<i", 48), struct.pack("<i", -3), struct.pack("<q", far),
                    struct.pack("<f", f), struct.pack("<?", flag), bytes(8), bytes(8),
                ]  # fmt: skip
                values = fake.started[-1][-1]
                assert values == wanted, (capability, values, wanted)
        assert [fake.calls.count(n) for n in ("cuModuleLoadData", "cuCtxSetCurrent")] == [1, 1]
        assert fake.started[0][:-1] == fake.started[1][:-1]
        name, grid, threads, shared, stream, _ = fake.started[0]
        found.append([capability, name, grid, threads, shared == kernel.metadata.shared, stream])
    return found


class Placed:
    """A tensor that shows a launch only type and address."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype, self.address = dtype, address

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return 0


def every_kernel() -> object:
    """Start all kernels; see `started`."""
    return started(starts_for("sm_90", is_brief=True))


def every_other_kernel() -> object:
    """Start the kernels that `targets --half 1 gfx1100 sm_90` compiles for sm_90."""
    return started(half_of(starts_for("sm_90", is_brief=True), 1, 1))


def started(starts: Sequence[KernelLaunch]) -> object:
    """Start each kernel twice, each time followed by Triton's own way to the driver.

    Returns:
        The kernels' names, and the wrongly passed arguments. The second start has other addresses.
    """
    wrong: list[str] = []
    sizes: list[int] = []
    fake = FakeCuda(lambda name: sizes)
    with on_fake_gpu(GPUTarget("cuda", 90, 32), fake):
        for start in starts:
            addresses = itertools.count(1 << 44, 4096)
            for _ in range(2):
                args = tuple(
                    Placed(x.dtype, next(addresses) + x.data_ptr() % 16)
                    if isinstance(x, torch.Tensor)
                    else x
                    for x in start.args
                )
                mine = replace(start, args=args)
                sizes[:] = parameter_bytes(mine.compiled().asm["ptx"])
                launch(
                    start.kernel, start.grid, *args, num_warps=start.num_warps,
                    num_stages=start.num_stages, **start.constants,
                )  # fmt: skip
                mine.run()
                ours, tritons = fake.started[-2:]
                is_right = b"".join(ours[-1]) == expected(mine, sizes)
                if ours != tritons or fake.functions[-1] != fake.functions[-2] or not is_right:
                    wrong.append(f"{start.kernel.__name__}: {args}: {ours}, by Triton {tritons}")
    return [sorted({start.kernel.__name__ for start in starts}), len(starts), wrong]


def expected(start: KernelLaunch, sizes: Sequence[int]) -> bytes:
    """Return the bytes of a launch's arguments, given the parameters' sizes.

    A one is compiled in, unless the kernel asks not to be specialised for values.
    """
    params = [param for param in start.kernel.params if not param.is_constexpr]
    left, found = iter(sizes), b""
    for param, x in zip(params, start.args, strict=True):
        if isinstance(x, float):
            found += struct.pack({4: "<f", 8: "<d"}[next(left)], x)
        elif isinstance(x, int):
            is_compiled_in = x == 1 and type(x) is int and not param.do_not_specialize
            found += b"" if is_compiled_in else x.to_bytes(next(left), "little", signed=x < 0)
        else:
            found += x.data_ptr().to_bytes(next(left), "little")
    return found + bytes(sum(left))


def same_choice() -> object:
    """Launch one kernel with many arguments; return where Triton would launch another variant.

    Each set of arguments comes twice: the second time, Tandem has a launch for it already.
    """
    x, y = torch.zeros(64, dtype=torch.float16), torch.zeros(64, dtype=torch.int8)
    tensors = ((x, y), (x[1:], y), (x[8:], y[16:]), (x, y[1:]), (y, y), (x.float(), y))
    numbers = [(n, *pair) for n in (0, 1, 2, 16, 1 << 33)
               for pair in ((1, 16), (16, 1), (1 << 40, -16))]  # fmt: skip
    last = ((1.0, True, 16), (0.5, False, 16), (0.5, False, 32))
    cases: list[tuple[Any, ...]] = [  # each with the usual ones, for each argument counts alone
        (a, b, n, plain, n, far, f, flag, size)
        for at, (a, b) in enumerate(tensors)
        for to, (n, plain, far) in enumerate(numbers)
        for by, (f, flag, size) in enumerate(last)
        if (at > 0) + (to > 0) + (by > 0) <= 1
    ]
    fake, wrong = FakeCuda(), []
    with on_fake_gpu(GPUTarget("cuda", 90, 32), fake):
        for case in [*cases, *reversed(cases)]:
            *args, size = case
            launch(of_all_kinds, (1,), *args, SIZE=size)
            KernelLaunch(of_all_kinds, (1,), tuple(args), {"SIZE": size}, 4, 2).run()
            if fake.functions[-1] != fake.functions[-2]:
                wrong.append(str(case))
    return [len(cases), len(set(fake.functions)), wrong]


def signatures() -> object:
    """Return the parameter sizes of kernels by their code and by their signature."""
    found = []
    x = torch.zeros(64, 64, dtype=torch.float16)
    starts = [
        KernelLaunch(of_all_kinds, (1,), (x, x, 1, 1, 7, 9, 0.0, False), {"SIZE": 64}, 4, 2),
        KernelLaunch(of_much_memory, (1,), (x, x, x), {"SIZE": 64}, 4, 2),
    ]
    with offline(GPUTarget("cuda", 86, 32)):
        for start in starts:
            kernel = compile_launch(start, CPU)
            ours = own_launcher.parameter_bytes(kernel.src.signature)
            found.append([parameter_bytes(kernel.asm["ptx"]), ours])
    return found


def shared_memory() -> object:
    """Return the driver calls for a kernel that needs much shared memory."""
    fake = FakeCuda()
    x = torch.zeros(128, 128, dtype=torch.float16)
    with offline(GPUTarget("cuda", 90, 32), fake):
        KernelLaunch(of_much_memory, (1,), (x, x, x), {"SIZE": 128}, 4, 3).run()
    return [fake.attributes, fake.started[0][3]]


def other_parameters() -> object:
    """Return the error for a kernel with unknown parameters in its code."""
    x = torch.zeros(64, 64, dtype=torch.float16)
    with offline(GPUTarget("cuda", 90, 32), FakeCuda(lambda name: [8, 8, 4])):
        try:
            KernelLaunch(of_much_memory, (1,), (x, x, x), {"SIZE": 64}, 4, 2).run()
        except ValueError as error:
            return str(error)
    return ""


def ahead() -> object:
    """Check that launches find the variants that were compiled ahead, without memory."""
    starts: list[KernelLaunch] = []
    meta = torch.empty(4, 64, dtype=torch.float16, device="meta")
    real = torch.zeros(4, 64, dtype=torch.float16)
    compiled: list[str] = []
    triton.knobs.compilation.listener = lambda **facts: compiled.append(facts["src"].name)

    def all_starts(x: torch.Tensor) -> None:
        for n in (48, 1, 7, 9, 7, 1 << 33):
            for view in (x, x[1:], x.flatten()[1:]):
                launch(of_all_kinds, (1,), view, x, n, n, 2, n, 1.0, True, SIZE=32)
                launch(of_all_kinds, (1,), view, x, n, n, 2, n, 1.0, True, SIZE=16)

    with offline(GPUTarget("cuda", 90, 32)):
        with intercept_launches(lambda start: starts.append(start) or True):
            all_starts(meta)
        told: list[tuple[int, int]] = []
        work = Compiling(CPU, starts, lambda done, total: told.append((done, total)), 3)
        work.wait()
        n_ahead = len(compiled)
        all_starts(real)
    assert told == [(n, work.n_total) for n in range(work.n_total + 1)]
    assert work.n_done == work.n_total == len(variants(starts))
    return [len(starts), work.n_total, n_ahead, len(compiled)]


def whole_passes() -> object:
    """Check that loading compiles all kernels of passes with any number of tokens."""
    counts = [1, 2, 3, 5, 8, 9, 15, 17, 31, 33, 63, 65, 100, 128, 129, 200, 257, 300, 427, 511]
    counts += [513, 600, 1023, 1025, 1500, 2047]
    targets = [KernelTarget("nvidia", n, n_sm) for n, n_sm in ((75, 68), (86, 82), (90, 132))]
    targets += [KernelTarget("amd", 0, 96)]
    missing: list[str] = []
    with TemporaryDirectory() as folder:
        moe = hollow_moe(
            Path(folder) / "moe.gguf", n_layer=2, n_embd=2048, n_head=32, n_head_kv=4, n_ff_exp=768
        )
        llama = hollow_llama(Path(folder) / "llama.gguf", n_layer=2)
        for path, some in ((moe, targets[::2]), (llama, targets[1::2])):
            for target in some:
                known = {
                    variant_key(start) for start in dry_run_launches(path, target, warm_rows(2048))
                }
                for n in counts:
                    wanted = dry_run_launches(path, target, [n])
                    missing += [
                        f"{target}: {start.kernel.__name__} for {n} tokens: {start.constants}"
                        for start in wanted
                        if variant_key(start) not in known
                    ]
    return missing


def dry_run_launches(path: Path, target: KernelTarget, row_counts: list[int]) -> list[KernelLaunch]:
    """Return the kernel launches of a dry run of a model on one GPU."""
    params = LoadParams(str(path), devices=("cuda:0",), n_ctx=4096)
    with GGUFFile.open(path) as file:
        return collect_launches(declare(file, params), 0, params, target, row_counts)


def broken() -> object:
    """Return the error of a kernel that cannot be compiled."""

    def wrong(x, SIZE: tl.constexpr):
        tl.store(x + tl.arange(0, SIZE), nothing)  # noqa: F821

    start = KernelLaunch(JITFunction(wrong), (1,), (torch.zeros(16),), {"SIZE": 16}, 4, 2)
    with offline(GPUTarget("cuda", 90, 32)):
        try:
            Compiling(CPU, [start]).wait()
        except kernel_launch.EngineError as error:
            return [str(error), error.hint]
    return []


def full_disk() -> object:
    """Compile where no file can be written, so that kernels go to a temporary folder."""
    folder, put = os.environ["TRITON_CACHE_DIR"], FileCacheManager.put

    def put_there(manager: FileCacheManager, *args: object, **options: object) -> str:
        if manager.cache_dir.startswith(folder):
            raise OSError(28, "No space left on device")
        return put(manager, *args, **options)

    FileCacheManager.put = put_there
    x = torch.zeros(64, 64, dtype=torch.float16)
    starts = [
        KernelLaunch(of_all_kinds, (1,), (x, x, n, 1, 7, 9, 0.0, False), {"SIZE": 64}, 4, 2)
        for n in (1, 2, 16)
    ]
    with offline(GPUTarget("cuda", 90, 32)):
        Compiling(CPU, starts).wait()
    now = os.environ["TRITON_CACHE_DIR"]
    threading.Thread(target=leave_cache, args=(folder, OSError(28, "full"))).start()  # too late
    return [folder != now, os.environ["TRITON_CACHE_DIR"] == now, len(os.listdir(now))]


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
