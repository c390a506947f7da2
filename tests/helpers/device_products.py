"""What products on a device must say, where operands are rounded."""

import torch
from torch import Tensor

from engine.gpu.matmul.dequant_gemm import half_dtype, to_half


def assert_near(y: Tensor, x: Tensor, values: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """As products of operands that were rounded to `dtype`, but for roundings of F32.

    Args:
        values: (…, n_out, n_in), rounded already.
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
    """As operands of tensor cores; Triton's interpreter cuts off what devices round to BF16."""
    dtype = half_dtype(values.device)
    if values.device.type == "cpu":
        return (values.view(torch.int32) & -65536).view(torch.float32).to(dtype)
    return values.to(dtype)
