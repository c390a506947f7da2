"""Activations quantised to bytes, against `cpu.kernels.products.panels`."""

from unittest import mock

import pytest
import torch

from engine.backends.cpu.kernels.products.panels import MAX_NUMBER
from engine.backends.gpu.launch.configs import KernelTarget
from engine.backends.gpu.quantised import quantise
from engine.formats.quants.layout import Extent

EXTENTS = (Extent.of(0, 64), Extent.of(40, 700), Extent.of(31, 33), Extent.of(96, 97))


@pytest.mark.parametrize("extent", EXTENTS, ids=lambda e: f"{e.lead}-{e.n_columns}")
@pytest.mark.parametrize("x_bytes", [1, 2])
def test_bytes(extent: Extent, x_bytes: int, device: str) -> None:
    x = torch.randn(3, extent.n_columns, device=device)
    x[1] *= 1e-35  # counts as zeros
    x[2] *= 1e20
    with mock.patch.object(KernelTarget, "gemv_operands", "int8"):
        rows = quantise(x, extent, x_bytes)
    padded = torch.zeros(3, extent.n_blocks * 32, device=device)
    padded[:, extent.lead : extent.lead + extent.n_columns] = x
    halves = padded.view(3, extent.n_blocks, 2, 16)
    size = halves.abs().amax(-1)
    whole = (halves * (MAX_NUMBER[x_bytes] / size)[..., None]).round()
    whole = torch.where(size[..., None] < 2.0**-100, 0.0, whole)
    numbers = rows.numbers.view(torch.int8).view(3, extent.n_blocks, x_bytes, 2, 16).int()
    found = numbers[:, :, 0] if x_bytes == 1 else numbers[:, :, 0] * 255 + numbers[:, :, 1]
    assert ((found - whole).abs() <= (1 if x_bytes == 2 else 0)).all()
    assert numbers.abs().max() <= 127
    facts = rows.facts.view(torch.int32).view(3, extent.n_blocks, 4)
    torch.testing.assert_close(facts[..., :2].contiguous().view(torch.float32),
                               size / MAX_NUMBER[x_bytes], rtol=1e-6, atol=0)  # fmt: skip
    assert torch.equal(facts[..., 2:], found.sum(-1, dtype=torch.int32))
    assert not rows.counters.any()
    assert (rows.n_row, rows.x_bytes) == (3, x_bytes)


@pytest.mark.parametrize("extent", EXTENTS, ids=lambda e: f"{e.lead}-{e.n_columns}")
def test_numbers(extent: Extent, device: str) -> None:
    x = torch.randn(2, extent.n_columns, device=device)
    with mock.patch.object(KernelTarget, "gemv_operands", "f32"):
        rows = quantise(x, extent, 1)
    padded = torch.zeros(2, extent.n_blocks * 32, device=device)
    padded[:, extent.lead : extent.lead + extent.n_columns] = x
    assert rows.x_bytes == 0
    assert torch.equal(rows.numbers.view(torch.float32).view(2, -1), padded)
    sums = rows.facts.view(torch.float32).view(2, -1)
    torch.testing.assert_close(sums, padded.view(2, -1, 16).sum(-1))
    assert not rows.counters.any()
