"""The grouped GEMM over experts against separate products."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from engine.backends.cpu.kernels.language.isa import Isa, supported
from engine.backends.cpu.kernels.products import (
    experts,
    gemm,
    panel_packing,
    panels,
    quantised_gemm,
)
from engine.backends.cpu.kernels.products.panels import quantised_bytes
from engine.backends.cpu.kernels.running import jit
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.formats.quants.layout import BLOCK, LAYOUTS, Layout, n_tiles
from engine.model.forward.expert_rows import Groups
from tests.helpers.planes import planes_apart
from tests.helpers.tiers import swept

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

KINDS = [(Kind.Q6_K, 2), (Kind.Q4_0, 1), (Kind.Q6_K, 1), (Kind.MXFP4, 1)]
"""Types, each with bytes of an activation: super-block scales, block scales, powers of two."""

N_EXPERT, N_BLOCKS, SKIP = 7, 11, 3
FINITE = 0xBB
"""Mask of random bytes that keeps all scales finite."""


@dataclass(frozen=True)
class Kernels:
    """Kernels of one instruction set and type, for experts and for a single matrix."""

    isa: Isa
    kind: Kind
    x_bytes: int

    def run(self, pool: ThreadPool, name: str, *arguments: int) -> None:
        isa, layout, x_bytes = self.isa, self.layout, self.x_bytes
        of_type = f"{self.kind:d}-{x_bytes}"
        module, names, build = {  # modules as in the engine, so that each is compiled once
            "quantise": (
                f"panels-{x_bytes}", panels.ARGUMENTS,
                lambda m: panel_packing.build(m, isa, panel_packing.format_of(isa, x_bytes)),
            ),
            "multiply": (
                f"quantised-gemm-{of_type}", gemm.ARGUMENTS,
                lambda m: quantised_gemm.build(m, isa, layout, x_bytes),
            ),
            "quantise_groups": (
                f"expert-panels-{x_bytes}", experts.QUANTISE,
                lambda m: experts.build_quantise(m, isa, x_bytes),
            ),
            "multiply_groups": (
                f"experts-{of_type}", experts.MULTIPLY,
                lambda m: experts.build_multiply(m, isa, layout, x_bytes),
            ),
        }[name]  # fmt: skip
        assert len(arguments) == len(names)
        key = f"{name} {self}"
        if key not in _compiled:
            found = jit.addresses_by_source(module, isa, [name], build)[name]
            kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * (1 + len(names)))
            _compiled[key] = kernel(found)
        pool.wake()
        _compiled[key](pool.address, *arguments)

    def __str__(self) -> str:
        return f"{self.isa.name} {self.kind.name} {self.x_bytes}"

    def panel_bytes(self, n_row: int) -> int:
        return quantised_bytes(n_row, N_BLOCKS, self.x_bytes)

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.kind]

    def planes(self, n_rows: int) -> Bytes:
        """Return the planes of all experts, (N_EXPERT, n_tile, tile_bytes)."""
        shape = N_EXPERT, n_tiles(n_rows), self.layout.tile_bytes(N_BLOCKS, SKIP)
        planes = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        places = planes_apart(np.arange(shape[-1])[None], self.layout, N_BLOCKS, SKIP)[0]
        planes[..., places[self.layout.offsets(N_BLOCKS, SKIP)[1] :]] &= FINITE
        return planes


_compiled: dict[str, Callable[..., None]] = {}
_all = [Kernels(isa, kind, n) for isa in supported() for kind, n in KINDS]
_quick = [*_all[: len(KINDS)], *_all[len(KINDS) + 1 :: len(KINDS)]]
every_kernel = pytest.mark.parametrize("kernels", swept(_all, _quick), ids=str)
"""All on the best instruction set here; one type on the others."""


@pytest.fixture(params=[1, 3], scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    pool = ThreadPool(request.param)
    yield pool
    pool.close()


def one_by_one(kernels: Kernels, planes: Bytes, n_rows: int, x: Floats, groups: Groups) -> Floats:
    """Compute each expert's product separately."""
    pool, out = ThreadPool(1), np.empty((len(x), n_rows), np.float32)
    memory = np.empty(kernels.panel_bytes(len(x)), np.uint8)
    for expert, rows in groups:
        n, part, goal = rows.stop - rows.start, x[rows], out[rows]
        kernels.run(
            pool,
            "quantise",
            part.ctypes.data,
            part.strides[0],
            n,
            N_BLOCKS,
            SKIP,
            memory.ctypes.data,
        )
        kernels.run(
            pool, "multiply", planes[expert].ctypes.data, planes.strides[1], N_BLOCKS, SKIP,
            memory.ctypes.data, n, goal.ctypes.data, goal.strides[0], n_rows, planes.shape[1],
            planes.shape[1], 1024,
        )  # fmt: skip
    pool.close()
    return out


def at_once(
    kernels: Kernels, pool: ThreadPool, planes: Bytes, n_rows: int, x: Floats, groups: Groups,
    sizes: tuple[int, int],
) -> Floats:  # fmt: skip
    """Compute all experts in one job, in pieces of these sizes; x may be one row for all."""
    n_row, is_shared = groups.n_row, len(x) < groups.n_row
    out = np.full((n_row, n_rows + 3), np.nan, np.float32)
    memory = np.empty(kernels.panel_bytes(len(x)), np.uint8)
    where = x.ctypes.data, x.strides[0]
    table = groups.table.data_ptr(), len(groups.table)
    if is_shared:
        kernels.run(pool, "quantise", *where, 1, N_BLOCKS, SKIP, memory.ctypes.data)
    else:
        kernels.run(
            pool, "quantise_groups", *where, N_BLOCKS, SKIP, memory.ctypes.data, 0, 1, *table
        )
    kernels.run(
        pool, "multiply_groups", planes.ctypes.data, *planes.strides[:2], N_BLOCKS, SKIP,
        memory.ctypes.data, 0 if is_shared else kernels.panel_bytes(1), out.ctypes.data,
        out.strides[0], n_rows, planes.shape[1], *sizes, *table,
    )  # fmt: skip
    assert np.isnan(out[:, n_rows:]).all()
    return out[:, :n_rows]


@every_kernel
@pytest.mark.parametrize(("n_rows", "sizes"), [(16, (1, 16)), (53, (3, 8))])
@pytest.mark.parametrize("n_token", [1, 9, 70])
def test_grouped_products_have_the_bits_of_separate_ones(
    kernels: Kernels, pool: ThreadPool, n_rows: int, n_token: int, sizes: tuple[int, int]
) -> None:
    """Expert 0 gets most tokens, the last one none; its weights are NaN."""
    torch.manual_seed(n_token)
    liked = torch.tensor([2.0, *[0.0] * (N_EXPERT - 2), -99.0])
    groups = Groups.of((torch.randn(n_token, N_EXPERT) + liked).topk(3).indices.sort().values)
    planes = kernels.planes(n_rows)
    planes[-1] = 0xFF
    x = torch.randn(groups.n_row, N_BLOCKS * BLOCK).numpy()
    expected = one_by_one(kernels, planes, n_rows, x, groups)
    assert np.isfinite(expected).all()
    found = at_once(kernels, pool, planes, n_rows, x, groups, sizes)
    assert np.array_equal(found, expected)


@every_kernel
def test_one_row_for_all_experts_is_quantised_once(kernels: Kernels, pool: ThreadPool) -> None:
    groups, planes = Groups.of(torch.tensor([[0, 3, 5]])), kernels.planes(40)
    x = torch.randn(1, N_BLOCKS * BLOCK).numpy()
    expected = one_by_one(kernels, planes, 40, x.repeat(3, axis=0), groups)
    assert np.array_equal(at_once(kernels, pool, planes, 40, x, groups, (2, 8)), expected)


@every_kernel
def test_rows_are_quantised_from_their_tokens(kernels: Kernels, pool: ThreadPool) -> None:
    groups = Groups.of(torch.randn(21, N_EXPERT).topk(3).indices.sort().values)
    x = torch.randn(21, N_BLOCKS * BLOCK)
    gathered, table = groups.rows(x), (groups.table.data_ptr(), len(groups.table))
    found = []
    for rows, pairs in ((gathered, 0), (x, groups.pair_of.data_ptr())):
        memory = np.zeros(kernels.panel_bytes(groups.n_row), np.uint8)
        kernels.run(
            pool, "quantise_groups", rows.data_ptr(), 4 * rows.stride(0), N_BLOCKS, SKIP,
            memory.ctypes.data, pairs, 3, *table,
        )  # fmt: skip
        found.append(memory)
    assert np.array_equal(*found)
