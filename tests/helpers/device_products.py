"""Expected results of products on a device, which rounds the operands."""

import torch
from torch import Tensor

from engine.backends.gpu.matmul.dequant_gemm import half_dtype, to_half


def assert_near(y: Tensor, x: Tensor, values: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Check that y is the product of x, rounded to `dtype`, and values, but for roundings of F32.

    Args:
        values: weights (…, n_out, n_in), rounded already.
    """
    numbers, scale = to_half(x, dtype)
    expected = numbers.double() @ values.double().mT
    if scale is not None:
        expected *= scale
    deviation = (x.double().square() @ values.double().square().mT).sqrt()
    assert y.dtype == torch.float32
    assert y.shape == expected.shape
    assert ((y - expected).abs() <= 1e-5 * deviation + 1e-6).all()


def short(values: Tensor) -> Tensor:
    """Return values as operands of tensor cores: rounded on a device.

    Triton's interpreter cuts bits off where devices round to BF16.
    """
    dtype = half_dtype(values.device)
    if values.device.type == "cpu":
        return (values.view(torch.int32) & -65536).view(torch.float32).to(dtype)
    return values.to(dtype)
