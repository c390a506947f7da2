# ruff: noqa: N803 what a kernel is compiled for is written in capitals
"""Interpreted operations on operands of known types, against numpy."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from engine.backends.gpu.launch.kernel_launch import is_interpreted, launch


@triton.jit
def mixed(numbers, halves, out, quotients, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    n = tl.load(numbers + at)
    h = tl.load(halves + at)
    tl.store(out + at, (n * 2 + 1).to(tl.float32))
    tl.store(out + SIZE + at, n * 2.5 + 1.0)  # the same tensor with numbers of another type
    tl.store(out + 2 * SIZE + at, n.to(tl.float32) * -0.0)
    tl.store(out + 3 * SIZE + at, n.to(tl.float32) * 0.0)
    tl.store(out + 4 * SIZE + at, tl.sum(n[:, None] + 10 * at[None, :], axis=1).to(tl.float32))
    tl.store(out + 5 * SIZE + at, (n // 3 + (n > 1).to(tl.int32)).to(tl.float32))
    tl.store(out + 6 * SIZE + at, (n + (1 << 30)) * 2.0)  # too large for an integer
    tl.store(quotients + at, h / (h + 1.0))


@pytest.mark.skipif(not is_interpreted(mixed), reason="kernels are compiled")
def test_known_operands_give_the_same_numbers() -> None:
    n, h = np.arange(16, dtype=np.int32), np.linspace(0.1, 3, 16).astype(np.float16)
    for _ in range(2):  # first created, then cached
        out, quotients = torch.zeros(7, 16), torch.zeros(16)
        launch(mixed, (1,), torch.from_numpy(n), torch.from_numpy(h), out, quotients, SIZE=16)
        rows = out.numpy()
        assert np.array_equal(rows[0], n * 2 + 1)
        assert np.array_equal(rows[1], n * 2.5 + 1)
        assert np.signbit(rows[2]).all()
        assert not np.signbit(rows[3]).any()
        assert np.array_equal(rows[4], 16 * n + 10 * n.sum())
        assert np.array_equal(rows[5], n // 3 + (n > 1))
        assert np.array_equal(rows[6], (n + (1 << 30)).astype(np.float32) * 2)
        wide = h.astype(np.float32)
        assert np.array_equal(quotients.numpy(), wide / (h + np.float16(1)).astype(np.float32))
