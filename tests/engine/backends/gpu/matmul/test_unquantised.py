"""Gemv with unquantised matrices."""

import pytest
import torch

from engine.backends.gpu.matmul import gemv
from engine.model.forward.attention import computing
from tests.helpers.checked_pass import checked

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_dtype
@pytest.mark.parametrize(
    ("n_rows", "n_columns"), [(1, 1), (3, 33), (5, 256), (45, 1024), (2, 2085), (7, 4096)]
)
@pytest.mark.parametrize("n_row", [1, 3, 8])
def test_products(n_rows: int, n_columns: int, n_row: int, dtype: torch.dtype, device: str) -> None:
    data = torch.randn(n_rows, n_columns, device=device).to(dtype)
    x = torch.randn(n_row, n_columns, device=device)
    y = gemv.plain_product(x, data)
    assert y is not None
    torch.testing.assert_close(y.double(), x.double() @ data.double().T, rtol=1e-5, atol=1e-4)


@every_dtype
def test_a_rows_bits_do_not_depend_on_others(dtype: torch.dtype, device: str) -> None:
    data = torch.randn(37, 1100, device=device).to(dtype)
    x = torch.randn(8, 1100, device=device)
    whole = gemv.plain_product(x, data)
    assert whole is not None
    for n in (1, 2, 3, 5):
        y = gemv.plain_product(x[8 - n :], data)
        assert y is not None
        assert torch.equal(y, whole[8 - n :])


@every_dtype
def test_so_do_those_of_more_rows_that_check_guesses(dtype: torch.dtype, device: str) -> None:
    data = torch.randn(37, 1100, device=device).to(dtype)
    x = torch.randn(13, 1100, device=device)
    with computing(checked(13)):
        whole = gemv.plain_product(x, data)
    assert whole is not None
    for rows in (slice(0, 8), slice(6, 9), slice(12, 13)):
        y = gemv.plain_product(x[rows], data)
        assert y is not None
        assert torch.equal(y, whole[rows])


def test_rows_may_lie_apart(device: str) -> None:
    data = torch.randn(9, 64, device=device)
    x = torch.randn(4, 200, device=device)
    for view in (x[:, 3:67], x[:, 16:80], torch.randn(64, 4, device=device).T):
        y = gemv.plain_product(view, data)
        assert y is not None
        torch.testing.assert_close(y, view @ data.T, rtol=1e-5, atol=1e-5)


def test_what_it_does_not_serve() -> None:
    data = torch.randn(9, 64)
    assert gemv.plain_product(torch.randn(9, 64), data) is None
    assert gemv.plain_product(torch.randn(2, 9), data.T) is None


def test_rows_are_looked_up(device: str) -> None:
    data = torch.randn(5, 40, device=device).bfloat16()
    ids = torch.tensor([4, -1, 0, 5], device=device)
    found = gemv.look_up(data, ids)
    assert torch.equal(found[[0, 2]], data[[4, 0]].float())
    assert not found[[1, 3]].any()
