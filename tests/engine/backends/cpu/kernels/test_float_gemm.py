"""Products with unquantised matrices against float64, on every instruction set."""

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.backends.cpu.kernels.language.isa import Isa, supported
from engine.backends.cpu.kernels.products import float_gemm
from engine.backends.cpu.kernels.running import jit
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    pool = ThreadPool(2)
    yield pool
    pool.close()


def kernel(isa: Isa, kind: str, name: str) -> Callable[..., None]:
    found = jit.addresses_by_source(
        f"float-gemm-{kind}", isa, float_gemm.NAMES, lambda m: float_gemm.build(m, isa, kind)
    )
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * (1 + len(float_gemm.ARGUMENTS)))(found[name])


@pytest.mark.parametrize("isa", supported(), ids=lambda isa: isa.name)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("n_heads", "n_rows", "n_columns", "n_tokens"), [(1, 1, 1, 1), (3, 7, 70, 13), (2, 96, 65, 6)]
)
def test_products_match_float64(
    isa: Isa, pool: ThreadPool, kind: str, transposed: bool, n_heads: int, n_rows: int,
    n_columns: int, n_tokens: int,
) -> None:  # fmt: skip
    """All heads' products; tokens and matrices have strided rows."""
    torch.manual_seed(0)
    w = torch.randn(n_heads, n_rows, n_columns + 5).to(DTYPES[kind])[:, :, :n_columns]
    n_in, n_out = (n_rows, n_columns) if transposed else (n_columns, n_rows)
    x = torch.randn(n_tokens, n_heads, n_in + 3)[:, :, :n_in]
    y = torch.full((n_tokens + 1, n_heads, n_out + 2), 7.5)
    pool.wake()
    kernel(isa, kind, float_gemm.NAMES[transposed])(
        pool.address, w.data_ptr(), w.stride(1) * w.element_size(), n_rows, n_columns,
        x.data_ptr(), 4 * x.stride(0), n_tokens, y.data_ptr(), 4 * y.stride(0), 6, 13, n_heads,
        w.stride(0) * w.element_size(), 4 * x.stride(1), 4 * y.stride(1),
    )  # fmt: skip
    exact = torch.einsum("thi,hio->tho", x.double(), (w if transposed else w.mT).double())
    size = torch.einsum("thi,hio->tho", x.abs(), (w if transposed else w.mT).float().abs())
    found: Tensor = y[:n_tokens, :, :n_out]
    assert ((found - exact).abs() <= 2e-6 * size).all()
    assert np.all(y[:, :, n_out:].numpy() == 7.5)
    assert np.all(y[n_tokens:].numpy() == 7.5)
