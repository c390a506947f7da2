"""Kernels for ARM in an emulator, if one is installed: packing, panels and products.

On Debian: apt install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross.
"""

import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from numpy.typing import NDArray

from engine.backends.cpu.kernels.language.isa import Isa, Neon, chosen
from engine.backends.cpu.kernels.packing import pack
from engine.backends.cpu.kernels.products import panel_packing, panels, quantised_gemm
from engine.backends.cpu.kernels.running import jit, thread_pool
from engine.formats.quants.layout import LAYOUTS
from tests.helpers.kernel_modules import TYPICAL, Build
from tests.helpers.kernels import activations, isa_named, packed, random_rows
from tests.helpers.planes import TYPES

EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
COMPILER = shutil.which("aarch64-linux-gnu-gcc")
TRIPLE = "aarch64-unknown-linux-gnu"

pytestmark = pytest.mark.skipif(
    not (EMULATOR and COMPILER), reason="no qemu-aarch64 or no aarch64-linux-gnu-gcc"
)

N_ROWS, N_COLUMNS = 37, 3 * 256
FIRST, N_BLOCKS = 3, 18

PROGRAM = """
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t N;
void KERNEL(N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N);

static _Alignas(64) char pool[TEAM_BYTES];

static N next(void) {
    N number;
    if (fread(&number, sizeof number, 1, stdin) != 1) exit(2);
    return number;
}

/* Arguments: -1 and a number, or a size and so many bytes, which are written out again. */
int main(void) {
    N size[15] = {0}, a[15] = {0}, count = next();
    int (*yield)(void) = sched_yield;
    memcpy(pool + TEAM_YIELD, &yield, sizeof yield);
    for (N i = 0; i < count; i++) {
        size[i] = next();
        if (size[i] < 0) {
            a[i] = next();
        } else {
            void *memory = aligned_alloc(64, (size[i] + 127) / 64 * 64);
            if (fread(memory, 1, size[i], stdin) != (size_t)size[i]) return 2;
            a[i] = (N)memory;
        }
    }
    KERNEL((N)pool, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11],
           a[12], a[13], a[14]);
    for (N i = 0; i < count; i++)
        if (size[i] > 0) fwrite((void *)a[i], 1, size[i], stdout);
    return 0;
}
"""

typical_first = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in TYPICAL else [pytest.mark.slow]) for kind in TYPES],
    ids=lambda kind: kind.name,
)


class Emulator:
    """ARM emulator that compiles, links and runs one kernel at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(
        self, isa: Isa, build: Build, name: str, *arguments: int | NDArray[np.generic]
    ) -> list[bytes]:
        """Call a kernel and return the arrays among its arguments."""
        program = self._linked(isa, build, name)
        given = struct.pack("<q", len(arguments))
        for argument in arguments:
            if isinstance(argument, int):
                given += struct.pack("<2q", -1, argument)
            else:
                given += struct.pack("<q", argument.nbytes) + argument.tobytes()
        found = subprocess.run(
            [str(EMULATOR), program], input=given, capture_output=True, check=True, timeout=120
        ).stdout
        sizes = [a.nbytes for a in arguments if not isinstance(a, int)]
        assert len(found) == sum(sizes)
        ends = np.cumsum(sizes)
        return [found[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def _linked(self, isa: Isa, build: Build, name: str) -> Path:
        """Link an ARM program that calls the kernel."""
        program = self._folder / f"{name}-{isa.name}"
        code, source = program.with_suffix(".o"), program.with_suffix(".c")
        code.write_bytes(jit.object_file(isa, build, TRIPLE))
        source.write_text(PROGRAM)
        subprocess.run(
            [
                str(COMPILER), "-static", "-O1", f"-DKERNEL={name}",
                f"-DTEAM_BYTES={thread_pool.memory_bytes(1)}", f"-DTEAM_YIELD={thread_pool.YIELD}",
                source, code,
                "-o", program,
            ],
            check=True, timeout=120,
        )  # fmt: skip
        return program


@pytest.fixture
def emulator(tmp_path: Path) -> Emulator:
    return Emulator(tmp_path)


@pytest.fixture(scope="module")
def here() -> Iterator[thread_pool.ThreadPool]:
    """Return a pool on this machine."""
    made = thread_pool.ThreadPool(1)
    yield made
    made.close()


def panels_of(emulator: Emulator, isa: Isa, x: NDArray[np.float32]) -> NDArray[np.uint8]:
    n_tokens, n_blocks = len(x), x.shape[1] // 32
    goal = np.zeros(panels.quantised_bytes(n_tokens, n_blocks), np.uint8)
    found = emulator.run(
        isa, lambda m: panel_packing.build(m, isa, panel_packing.format_of(isa, 1)), "quantise",
        x, x.strides[0], n_tokens, n_blocks, 0, goal,
    )  # fmt: skip
    return np.frombuffer(found[1], np.uint8)


def products_of(
    emulator: Emulator, isa: Isa, kind: Kind, planes: NDArray[np.uint8], panel: NDArray[np.uint8],
    n_tokens: int,
) -> NDArray[np.float32]:  # fmt: skip
    layout, skip = LAYOUTS[kind], FIRST % 8
    out = np.zeros((n_tokens, N_ROWS), np.float32)
    found = emulator.run(
        isa, lambda m: quantised_gemm.build(m, isa, layout), "multiply",
        planes, layout.tile_bytes(N_BLOCKS, skip), N_BLOCKS, skip, panel, n_tokens,
        out, out.strides[0], N_ROWS, -(-N_ROWS // 16), 2, 4,
    )  # fmt: skip
    return np.frombuffer(found[2], np.float32).reshape(out.shape)


@typical_first
def test_planes_are_those_of_this_machine(
    kind: Kind, emulator: Emulator, here: thread_pool.ThreadPool
) -> None:
    raw, tile_bytes = random_rows(kind, N_ROWS, N_COLUMNS), LAYOUTS[kind].tile_bytes(N_BLOCKS, 3)
    goal = np.zeros(-(-N_ROWS // 16) * tile_bytes, np.uint8)
    found = emulator.run(
        Neon(), lambda m: pack.build(m, kind), "pack",
        raw, raw.strides[0], N_ROWS, 0, FIRST, N_BLOCKS, goal, tile_bytes,
    )  # fmt: skip
    expected = packed(raw, kind, chosen(), here, first=FIRST, n_blocks=N_BLOCKS)
    assert found[1] == expected.tobytes()


@pytest.mark.parametrize("isa_name", ["neon", pytest.param("generic", marks=pytest.mark.slow)])
@typical_first
def test_products_match_float64(
    kind: Kind, isa_name: str, emulator: Emulator, here: thread_pool.ThreadPool
) -> None:
    isa, n_tokens = isa_named(isa_name), 7
    raw = random_rows(kind, N_ROWS, N_COLUMNS)
    x = np.random.default_rng(1).standard_normal((n_tokens, 32 * N_BLOCKS), np.float32)
    planes = packed(raw, kind, chosen(), here, first=FIRST, n_blocks=N_BLOCKS)
    panel = panels_of(emulator, isa, x)
    seen = activations(panel, n_tokens, N_BLOCKS, isa)
    assert np.abs(seen - x).max() <= np.abs(x).max() / 127
    weights = dequantize(raw, kind).astype(np.float64)[:, 32 * FIRST : 32 * (FIRST + N_BLOCKS)]
    exact = seen @ weights.T
    out = products_of(emulator, isa, kind, planes, panel, n_tokens)
    assert np.abs(out - exact).max() <= 1e-6 * np.abs(exact).max()


def test_nan_and_infinity_become_nan(emulator: Emulator, here: thread_pool.ThreadPool) -> None:
    isa, kind = Neon(), Kind.Q4_K
    x = np.ones((5, 32 * N_BLOCKS), np.float32)
    x[1, 40], x[2, 100], x[3, 200] = np.nan, np.inf, -np.inf
    raw = random_rows(kind, N_ROWS, N_COLUMNS)
    planes = packed(raw, kind, chosen(), here, first=FIRST, n_blocks=N_BLOCKS)
    out = products_of(emulator, isa, kind, planes, panels_of(emulator, isa, x), 5)
    assert np.isfinite(out).all(1).tolist() == [True, False, False, False, True]
    assert not np.isfinite(out[1:4]).any()
