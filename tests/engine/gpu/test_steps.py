"""Small operations by kernels against the reference."""

import pytest
import torch

from engine.gpu import steps
from engine.ops.reference import ReferenceOps

EXACT = ReferenceOps()


@pytest.mark.parametrize("n", [1, 40, 256])
@pytest.mark.parametrize("n_row", [1, 3])
def test_rms_norm(n: int, n_row: int, device: str) -> None:
    x, weight, bias = (torch.randn(shape, device=device) for shape in ((n_row, n), (n,), (n,)))
    for w, b in ((weight, bias), (weight, None), (None, None)):
        y = steps.rms_norm(x, w, b, 1e-5)
        assert y is not None
        torch.testing.assert_close(y, EXACT.rms_norm(x, w, b, 1e-5))
