"""Time that the host takes to start a model's kernels on a GPU, measured without one.

    python -m tests.bench.host_time [--rows 512 ...] [--rounds N] [--profile]

A Llama of 8B (32 blocks of 4096 unless asked for others, 32 and 8 heads, FFN 14336, Q4_K and Q6_K)
computes batches of tokens on tensors without memory. All that Python and PyTorch do for it is done:
views, allocations, the choice of kernels, the search for the compiled kernel (really compiled, for
sm_90), the packing of its arguments, and a call through ctypes of a function that does nothing.
Missing are what NVIDIA's driver and cuBLAS do in their calls, and PyTorch's allocator on a card.

The table has, for each number of rows and way of starting kernels: launches of our kernels,
operations of PyTorch, and the best and the median of the thread's CPU times in ms. With
`--profile`, cProfile's list follows.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import os
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "0"  # kernels are compiled

import torch
from llvmlite import binding as llvm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from engine.backends.gpu.launch import configs as target
from engine.backends.gpu.launch.configs import KernelTarget
from engine.backends.gpu.launch.kernel_launch import KernelLaunch, intercept_launches
from engine.backends.gpu.loading.dry_run import META, dry_run_context
from engine.formats.gguf.reader import GGUFFile
from engine.load_params import LoadParams
from engine.model.architectures.declare import declare
from engine.model.forward.batch import Batch
from tests.engine.backends.gpu.offline import on_fake_gpu
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.hollow import hollow_llama

CARD = KernelTarget("nvidia", 90, 132)
"""Card that kernels are compiled for: an H100."""

IDLE = """
define i32 @cuLaunchKernel() { ret i32 0 }
define i32 @cuCtxGetCurrent(ptr %to) { store i64 77, ptr %to  ret i32 0 }
define i32 @cuCtxGetDevice(ptr %to) { store i32 0, ptr %to  ret i32 0 }
"""
"""Functions of a driver that does nothing, called by ctypes as the real ones are."""


class IdleCuda(FakeCuda):
    """Fake driver whose calls at each launch cost what calls through ctypes cost."""

    def __init__(self) -> None:
        super().__init__()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(IDLE), machine)
        self._engine.finalize_object()
        for name in ("cuLaunchKernel", "cuCtxGetCurrent", "cuCtxGetDevice"):
            address = self._engine.get_function_address(name)
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int)(address))


@contextmanager
def idle_card() -> Iterator[None]:
    """Let tensors on "meta" count as those of a card whose driver does nothing.

    Operations that PyTorch computes in Python on "meta" only are replaced: `empty_like` and
    `new_empty` by `empty`, and products by one of 1 x 1 on the CPU.
    """
    one, out, mm = torch.ones(1, 1), torch.ones(1, 1), torch.mm

    def product(a: Tensor, b: Tensor, out_dtype: object = None, out: Tensor = out) -> Tensor:
        mm(one, one, out=one)
        return out

    with (
        patch.object(torch, "mm", product),
        patch.object(torch, "empty_like", lambda x: torch.empty(x.shape, device=x.device)),
        patch.object(Tensor, "new_empty", _new_empty),
        on_fake_gpu(GPUTarget("cuda", CARD.capability, 32), IdleCuda()),
    ):
        yield


def _new_empty(x: Tensor, *shape: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(*shape, dtype=dtype or x.dtype, device=x.device)


class Operations(TorchDispatchMode):
    """Counter of PyTorch's operations.

    Attributes:
        found: number of calls of each operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def synthetic_model(path: Path) -> Iterator[Callable[[int], None]]:
    """Yield a function that computes a batch of tokens; only a single token has logits."""
    params = LoadParams(str(path), devices=("cuda:0",), n_ctx=8192)
    with GGUFFile.open(path) as file:
        declaration = declare(file, params)
        context, comm = dry_run_context(declaration, 0, params)

    def compute(n: int) -> None:
        comm.n_tokens = n
        context.begin(Batch.of_one(4096, n, n if n > 1 else 0))
        declaration.model.forward(torch.zeros(n, dtype=torch.int64, device=META), context)

    with torch.inference_mode(), patch.dict(target._cards, {META: CARD}):
        yield compute


def through_triton(start: KernelLaunch) -> bool:
    """Start a kernel as Triton does; return False, since it has been started."""
    start.run()
    return False


def counts(compute: Callable[[int], None], n: int) -> tuple[Counter[str], Counter[str]]:
    """Return the numbers of launches by kernel, and of PyTorch's operations, in a batch."""
    launches: Counter[str] = Counter()

    def note(start: KernelLaunch) -> bool:
        launches[start.kernel.__name__] += 1
        return False

    with intercept_launches(note), Operations() as operations:
        compute(n)
    return launches, operations.found


def measure(compute: Callable[[int], None], n: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round, by way of starting kernels; ways take turns."""

    def by_triton() -> None:
        with intercept_launches(through_triton):
            compute(n)

    def nothing() -> None:
        with intercept_launches(lambda start: False):
            compute(n)

    ways = {"Triton's run": by_triton, "Tandem": lambda: compute(n), "no launches": nothing}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():  # compile, and fill caches
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            begun = time.thread_time()
            way()
            found[name].append(time.thread_time() - begun)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 1])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args(argv)
    with TemporaryDirectory() as folder:
        path = hollow_llama(Path(folder) / "llama.gguf", n_layer=args.blocks)
        with idle_card(), synthetic_model(path) as compute:
            for n in args.rows:
                _report(compute, n, args.rounds)
                if args.profile:
                    _profile(compute, n)


def _report(compute: Callable[[int], None], n: int, rounds: int) -> None:
    launches, operations = counts(compute, n)
    seconds = measure(compute, n, rounds)
    n_launch, n_operation = sum(launches.values()), sum(operations.values())
    _write(f"{n} rows: {n_launch} launches, {n_operation} operations of PyTorch")
    for found in (launches, operations):
        _write("  " + ", ".join(f"{name} {number}" for name, number in found.most_common()))
    idle = min(seconds["no launches"])
    for name, times in seconds.items():
        each = (min(times) - idle) / n_launch * 1e6
        _write(f"  {name:14} {min(times) * 1e3:7.2f} {median(times) * 1e3:7.2f} ms"
               + (f" {each:6.1f} us each launch" if each else ""))  # fmt: skip


def _profile(compute: Callable[[int], None], n: int) -> None:
    profile = cProfile.Profile()
    with profile:
        for _ in range(10):
            compute(n)
    pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(40)


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
