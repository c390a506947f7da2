"""Dequantisation by PyTorch on a GPU; in a file of its own, which needs pytest alone."""

import pytest
import torch

from engine.formats.quants.dequantise import QUANTS, dequantise
from tests.helpers.block_bytes import assert_same_bits, random_rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("number", QUANTS, ids=lambda number: QUANTS[number].name)
def test_cuda_has_the_bits_of_the_cpu(number: int) -> None:
    """Both do the same operations in the same order, so that they round to the same bits."""
    raw = torch.from_numpy(random_rows(QUANTS[number], 16, 20))
    on_device = dequantise(raw.to("cuda"), number).cpu()
    assert_same_bits(on_device.numpy(), dequantise(raw, number).numpy())
