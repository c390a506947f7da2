"""All kernels for GPUs, compiled for real targets without a GPU.

    python -m tests.engine.backends.gpu.targets  each kernel once, for two targets
    python -m tests.engine.backends.gpu.targets --all [TARGET ...]  all variants
    python -m tests.engine.backends.gpu.targets --half 0 TARGET ...  half of the kernels

It shows registers, spills and shared memory of each, the worst of a kernel's variants, and ends
with status 1 where one does not compile, spills much, or has other parameters than our launcher
passes. `.ci/run` has the oldest Triton compile one half and the newest the other one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # read where a kernel is defined

import torch
import triton
from triton.backends.compiler import GPUTarget

from engine.backends.gpu.launch import own_launcher
from engine.backends.gpu.launch.configs import KernelTarget
from engine.backends.gpu.launch.kernel_launch import (
    Compiling,
    KernelLaunch,
    compile_launch,
    variants,
)
from tests.engine.backends.gpu.offline import offline, parameter_bytes
from tests.engine.backends.gpu.scenes import collect

QUICK = ("sm_90", "gfx1100")
N_SM = {"sm_61": 30, "sm_70": 80, "sm_75": 68, "sm_80": 108, "sm_86": 82, "sm_89": 128,
        "sm_90": 132, "sm_120": 170, "gfx1100": 96, "gfx1201": 64, "gfx942": 304}  # fmt: skip
"""Multiprocessors of a card per target: Tesla P40, V100, RTX 2080 Ti, A100, RTX 3090, 4090,
H200, RTX 5090, RX 7900 XTX, RX 9070 XT, MI300X."""

SWEEP = tuple(N_SM)

MAX_SHARED_BYTES = {"sm_61": 48, "sm_70": 96, "sm_75": 64, "sm_80": 163, "sm_86": 99,
                     "sm_89": 99, "sm_90": 227, "sm_120": 99, "gfx1100": 64, "gfx1201": 64,
                     "gfx942": 64}  # fmt: skip
"""Shared memory that a program may have, in KiB, per target."""

MAX_SPILLED_BYTES = 256
"""Most bytes of registers that a thread may spill: more would cost too many loads and stores."""

USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
AMD_USAGE = re.compile(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)")

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Usage:
    """Resources of one compiled variant of a kernel.

    Attributes:
        kernel: module and name.
        registers: registers of a thread.
        spilled_bytes: bytes of a thread's registers that are spilled to memory.
        shared_bytes: bytes of a program's shared memory.
    """

    target: str
    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_warps: int

    @property
    def problem(self) -> str:
        """Why the variant is not acceptable, "" if it is."""
        if self.spilled_bytes > MAX_SPILLED_BYTES:
            return f"spills {self.spilled_bytes} bytes"
        if self.shared_bytes > MAX_SHARED_BYTES[self.target] << 10:
            return f"needs {self.shared_bytes} bytes of shared memory"
        return ""


def targets_of(name: str) -> tuple[KernelTarget, Any]:
    """Return our and Triton's description of a target such as "sm_90"."""
    if name.startswith("sm_"):
        number = int(name[3:])
        return KernelTarget("nvidia", number, N_SM[name]), GPUTarget("cuda", number, 32)
    warp = 64 if name.startswith("gfx9") else 32
    return KernelTarget("amd", 0, N_SM[name]), GPUTarget("hip", name, warp)


def starts_for(name: str, *, is_brief: bool) -> list[KernelLaunch]:
    """Return the launches to compile: all variants, or one per kernel and kind of arithmetic."""
    found = variants(collect(targets_of(name)[0], is_brief=is_brief))
    if not is_brief:
        return found
    kinds = {(kernel_name(start), start.constants.get("KIND")): start for start in reversed(found)}
    return list(kinds.values())


def half_of(starts: Sequence[KernelLaunch], half: int, target: int) -> Sequence[KernelLaunch]:
    """Return some half of the launches, by the kernels' names; `half` is 0 or 1.

    They alternate from one target to the next, too, so that either half has each kernel for
    every other target.
    """
    return [start for start in starts if (_side(start) + half + target) % 2 == 0]


def _side(start: KernelLaunch) -> int:
    """Return 0 or 1, the same for a kernel and kind of arithmetic on all targets."""
    return crc32(f"{kernel_name(start)} {start.constants.get('KIND', '')}".encode()) & 1


def kernel_name(start: KernelLaunch) -> str:
    """Return a kernel's name, such as "norm.rms_norm"."""
    return f"{start.kernel.__module__.rpartition('.')[2]}.{start.kernel.__name__}"


def compile_for(name: str, starts: Iterable[KernelLaunch]) -> tuple[list[Usage], list[str]]:
    """Compile for a target; return the variants' resources and all problems."""
    starts, found, wrong = list(starts), [], []
    with offline(targets_of(name)[1]):
        for start in starts:
            try:
                compiled = compile_launch(start, CPU)
            except Exception as error:  # noqa: BLE001 compilers fail in all ways
                wrong.append(f"{name}: {kernel_name(start)}: {error} {start.constants}")
                continue
            usage = usage_of(name, start, compiled)
            found.append(usage)
            problem = usage.problem or parameter_problem(compiled)
            if problem:
                wrong.append(f"{name}: {usage.kernel}: {problem} {dict(start.constants)}")
    return found, wrong


def compile_ahead(name: str, starts: Sequence[KernelLaunch], n_threads: int) -> None:
    """Compile in several threads, so that `compile_for` finds all variants on disk."""
    with offline(targets_of(name)[1]):
        for start in starts:
            start.kernel.device_caches.clear()
        try:
            Compiling(CPU, starts, n_threads=n_threads).wait()
        except Exception as error:  # noqa: BLE001 reported for each variant afterwards
            sys.stderr.write(f"{name}: {error}\n")


def usage_of(name: str, start: KernelLaunch, compiled: Any) -> Usage:
    """Return the resources of a compiled kernel."""
    if "cubin" in compiled.asm:
        registers, stack, local = _nvidia_usage(compiled.asm["cubin"])
        spilled = stack + local
    else:
        facts = {key: int(value) for key, value in AMD_USAGE.findall(compiled.asm["amdgcn"])}
        registers, spilled = facts["vgpr_count"], facts["private_segment_fixed_size"]
    return Usage(
        name, kernel_name(start), registers, spilled, compiled.metadata.shared, start.num_warps
    )


def _nvidia_usage(cubin: bytes) -> tuple[int, int, int]:
    """Return the registers, and the bytes of stack and of local memory, of a thread."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    match = USAGE.search(done.stdout)
    assert match, done.stdout
    registers, stack, local = map(int, match.groups())
    return registers, stack, local


def parameter_problem(compiled: Any) -> str:
    """Return why our launcher would pass wrong parameters to a kernel for NVIDIA, "" if not."""
    if "ptx" not in compiled.asm:
        return ""
    wanted = parameter_bytes(compiled.asm["ptx"])
    is_right = wanted == own_launcher.parameter_bytes(compiled.src.signature)
    return "" if is_right else f"has parameters of {wanted} bytes"


def table(found: Sequence[Usage]) -> str:
    """Return a table of the worst variant of each kernel and target."""
    groups: dict[tuple[str, str], list[Usage]] = defaultdict(list)
    for usage in found:
        groups[usage.kernel, usage.target].append(usage)
    lines = [f"{'KERNEL':32} {'TARGET':8} {'VARIANTS':>8} {'REGISTERS':>9} {'SPILLED':>8} SHARED"]
    for (kernel, target), some in sorted(groups.items()):
        most = [
            max(getattr(u, key) for u in some)
            for key in ("registers", "spilled_bytes", "shared_bytes")
        ]
        lines.append(
            f"{kernel:32} {target:8} {len(some):8} {most[0]:9} {most[1]:6} B {most[2]:6} B"
        )
    return "\n".join(lines)


def main() -> int:
    """Compile for the targets on the command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.backends.gpu.targets")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(SWEEP))
    parser.add_argument("--all", action="store_true", help="all variants")
    parser.add_argument("--only", default="", metavar="REGEX", help="kernels such as gemv.products")
    parser.add_argument("--half", type=int, choices=(0, 1), help="a half of the variants")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: list[Usage] = []
    wrong: list[str] = []
    started: set[str] = set()
    for at, name in enumerate(args.targets or (SWEEP if args.all else QUICK)):
        begun = time.perf_counter()
        starts = starts_for(name, is_brief=not args.all)
        starts = [start for start in starts if re.search(args.only, kernel_name(start))]
        started |= set(map(kernel_name, starts))
        if args.half is not None:
            starts = list(half_of(starts, args.half, at))
        compile_ahead(name, starts, args.threads)
        some, bad = compile_for(name, starts)
        found, wrong = found + some, wrong + bad
        seconds = time.perf_counter() - begun
        sys.stderr.write(
            f"{name}: {len(starts)} variants by Triton {triton.__version__} in {seconds:.0f} s\n"
        )
    if args.json:
        kernels = [asdict(usage) for usage in found]
        document = {"kernels": kernels, "wrong": wrong, "started": sorted(started)}
        sys.stdout.write(json.dumps(document))
        return 0
    sys.stdout.write(table(found) + "\n")
    sys.stderr.write("".join(f"{line}\n" for line in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
