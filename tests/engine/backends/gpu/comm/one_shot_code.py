"""Compiled code of the packets of a one-shot all-reduce, read where kernels are compiled.

python -m tests.engine.backends.gpu.comm.one_shot_code sm_90 gfx1100
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # read where a kernel is defined

import torch
import triton

from engine.backends.gpu.comm.one_shot import OneShotGroups
from engine.backends.gpu.launch.configs import use_target
from engine.backends.gpu.launch.kernel_launch import (
    KernelLaunch,
    compile_launch,
    intercept_launches,
)
from engine.hardware.devices.topology import Routes
from engine.model.forward.operands import Addend
from engine.model.layers.norm import RMSNorm
from engine.model.sharding.placement import Replicate
from tests.engine.backends.gpu.offline import offline
from tests.engine.backends.gpu.targets import targets_of

META = torch.device("meta")

N_RANK, N = 3, 4096

NVIDIA = r"LDG\.E\.128\.STRONG\.SYS", r"STG\.E\.128\.STRONG\.SYS", r"LDG\.E\.128(\.SYS)? "
AMD = (
    r"global_load_b64 .*, off .*glc dlc", r"global_store_b64 .* dlc",
    r"global_load_b64 .*, off(?!.*glc dlc)",
)  # fmt: skip
"""Loads of packets, stores of packets, and loads that must not be in a loop."""

LABEL = re.compile(r"^\s*(\.L\w+):")
BRANCH = re.compile(r"(?:BRA(?:\.U)?|s_c?branch\w*)\s.*?(\.L\w+)")

END = re.compile(r"\*/\s+EXIT\b|s_endpgm")
"""The end of a program, whatever its flags are."""


def starts_of(name: str) -> list[KernelLaunch]:
    """Return the fused kernels of a rank with a partial sum, and of one without."""
    starts: list[KernelLaunch] = []
    with (
        use_target(targets_of(name)[0]),
        intercept_launches(lambda start: bool(starts.append(start))),
    ):
        one_shot = OneShotGroups([META] * N_RANK, Routes()).one_shot(1, tuple(range(N_RANK)))
        assert one_shot is not None
        x, norm = torch.empty(1, N, device=META), RMSNorm(N, 1e-5, Replicate((0,)))
        norm.weight = torch.empty(N, device=META)
        for own in (x, None):
            one_shot.add_norm(x, Addend(own), norm, 1)
    return starts


def reduced(ttgir: str) -> list[str]:
    """Return the layouts of summed values in threads, which decide the order of additions."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    found = re.findall(r"\}\) : \(tensor<\d+xf32, (#\w+)>\) -> f32", ttgir)
    return [layouts[name] for name in found]


def sass(cubin: bytes) -> str:
    """Return the instructions (SASS) of a kernel for NVIDIA."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True)
    return done.stdout


def loops(lines: Sequence[str]) -> Iterator[range]:
    """Return the loops: lines between each backward branch and its target.

    After the end of the program there are rare cases, which jump back without a loop.
    """
    labels = {m[1]: at for at, line in enumerate(lines) if (m := LABEL.match(line))}
    ends = places(lines, END.pattern)
    for at, line in enumerate(lines):
        m = BRANCH.search(line)
        loop = range(labels.get(m[1], at), at) if m else range(0)
        if loop and not any(end in loop for end in ends):
            yield loop


def facts_of(name: str) -> dict[str, Any]:
    """Return counts of the loads and stores of a compiled kernel.

    Returns:
        polls: loads of packets; `looped` of them are in a loop.
        n_pair: pairs of packets of each member that a thread reads.
        writes: stores of packets; `early` of them come before the first load.
        clocks: reads of the clock in a loop.
        weak: 64-bit loads in a loop that a cache may answer, except loads of address tables.
        strong: PTX names of the accesses that bypass caches.
        whole: PTX stores of two packets, each made of a word and the same flag.
        stores: all such stores.
        rough: PTX arithmetic without exact rounding, which may differ between kinds of GPUs.
        norms: how each kernel sums squares, see `reduced`.
    """
    starts = starts_of(name)
    with offline(targets_of(name)[1]):
        both = [compile_launch(start, torch.device("cpu")) for start in starts]
    compiled, start = both[0], starts[0]
    ptx, is_nvidia = compiled.asm.get("ptx", ""), "cubin" in compiled.asm
    text = sass(compiled.asm["cubin"]) if is_nvidia else compiled.asm["amdgcn"]
    lines = text.splitlines()
    poll, write, weak = NVIDIA if is_nvidia else AMD
    polls, writes = places(lines, poll), places(lines, write)
    looped = {at for loop in loops(lines) for at in loop}
    whole = re.findall(
        r"mov\.b64 a, \{%r\d+, (%r\d+)\}; mov\.b64 b, \{%r\d+, \1\}; "
        r"@p st\.relaxed\.sys\.global\.v2\.b64 \[%rd\d+\], \{a, b\};",
        ptx,
    )
    return {
        "polls": len(polls),
        "looped": len(looped & set(polls)),
        "n_pair": N // 2 // (32 * start.num_warps),
        "writes": len(writes),
        "early": sum(at < polls[0] for at in writes),
        "clocks": len(looped & set(places(lines, "GLOBALTIMER"))),
        "weak": len(looped & set(places(lines, weak))),
        "strong": sorted(set(re.findall(r"(?:ld|st)\.(?:volatile|relaxed)[\w.]*", ptx))),
        "whole": len(whole),
        "stores": ptx.count("st.relaxed"),
        "rough": sorted(set(re.findall(r"\b\w+\.(?:approx|full)[\w.]*", ptx))),
        "norms": [reduced(one.asm["ttgir"]) for one in both],
    }


def places(lines: Sequence[str], pattern: str) -> list[int]:
    """Return the numbers of the lines that match a pattern."""
    return [at for at, line in enumerate(lines) if re.search(pattern, line)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: facts_of(name) for name in sys.argv[1:]}))
